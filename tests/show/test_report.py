"""One file with every picture and number, and nothing from anywhere else."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest
from evaluating import full_evaluation, some_examples
from made_up import made_up

from stam.evaluation import Evaluation, compare
from stam.show.report import comparison_report, run_report

VOID = {"meta", "img", "source", "br"}
METRICS = [{"epoch": n, "loss/actor": 1.0, "val/accuracy@3": 0.1} for n in range(2)]


class Page(HTMLParser):
    """Collects tags and addresses, and checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.open = [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def count(self, tag: str, **attributes: str) -> int:
        return sum(name == tag and attributes.items() <= found.items() for name, found in self.tags)


@pytest.fixture
def evaluation() -> Evaluation:
    return full_evaluation()


@pytest.fixture(scope="module")
def text() -> str:
    return run_report(full_evaluation(), some_examples(), METRICS)


def test_the_page_needs_nothing_from_anywhere(text):
    page = Page(text)
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "<script" not in text and "@import" not in text and "url(" not in text
    assert page.count("meta", name="viewport") == 1


def test_the_page_has_every_picture_for_both_themes(text):
    page = Page(text)
    assert page.count("figure") == page.count("picture") == 10
    assert page.count("source", media="(prefers-color-scheme: dark)") == 10
    light = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', text)
    dark = re.findall(r'srcset="data:image/svg\+xml;base64,([^"]+)"', text)
    assert all(b"<svg" in base64.b64decode(each) for each in light + dark)
    assert set(light).isdisjoint(dark)
    assert all(dict(found).get("alt") for tag, found in page.tags if tag == "img")
    assert text.count("data:image/gif") == 2


def test_the_numbers_are_behind_the_pictures(text, evaluation):
    (held,) = re.findall(r'download="evaluation.json" href="data:application/json;base64,([^"]+)"', text)
    assert Evaluation.from_json(base64.b64decode(held).decode()) == evaluation
    assert Page(text).count("table") >= 10
    assert f"{100 * evaluation.accuracy.ensemble.top1.mean[3]:.2f}" in text


def test_strips_show_each_glimpse_once_with_answer_and_confidence(text):
    page = Page(text)
    # the scene, twelve glimpses, and policy maps after 1, 2, 3, 5 and 8
    assert text.count("data:image/webp") == 5 * (1 + 12 + 5)
    assert page.count("img", alt="seen after 12 glimpses") == page.count("img", alt="the scene") == 5
    assert page.count("img", alt="policy after 8 glimpses") == 5
    assert len(re.findall(r'class="answer (?:right|wrong)">[✓✗] ', text)) == 60


def test_names_cannot_break_the_page(text):
    assert "<b>ash</b>" not in text
    assert "&lt;b&gt;ash&lt;/b&gt;" in text
    assert "my &lt;run&gt;" in text and "<title>my &lt;run&gt;: STAM report</title>" in text


def test_a_result_with_little_in_it_still_has_a_page(monkeypatch):
    monkeypatch.setattr("stam.show.report.page.to_bytes", lambda figure, *arguments, **settings: b"<svg/>")
    page = Page(run_report(made_up()))
    assert page.count("section") == 5  # no cost, no training
    assert all(address.startswith(("data:", "#")) for address in page.addresses)


def test_the_page_of_a_comparison():
    found = compare([made_up("a", 0.01), made_up("b", 0.015, policy="random")], published="imagenet")
    text = comparison_report(found)
    page = Page(text)
    assert page.count("figure") == 5
    assert "PatchDrop" in text and "Random policy" in text
    files = dict(re.findall(r'download="([\w.]+)" href="data:[\w/]+;base64,([^"]+)"', text))
    assert base64.b64decode(files["table.csv"]).decode() == found.to_csv()
    assert base64.b64decode(files["table.md"]).decode() == found.to_markdown()
    assert json.loads(base64.b64decode(files["comparison.json"]))["format"] == "stam-comparison"
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
