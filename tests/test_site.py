"""The documentation site: built strictly, whole, and with nothing from other hosts; the notebooks run."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import stam
import stam.live

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))


class Page(HTMLParser):
    """Collects what a page has: its anchors, its links, and what the browser loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors.update(given[name] for name in ("id", "name") if given.get(name))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and "stylesheet" in given.get("rel", ""):
            self.loaded.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; where mkdocs is missing, its tests are skipped."""
    for package in ("material", "mkdocstrings", "mkdocs_jupyter"):
        pytest.importorskip(package, reason="the site is built with the extra docs")
    place = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return place


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_every_page_is_in_the_navigation(site):
    listed = re.findall(r"[\w/-]+\.(?:md|ipynb)", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1])
    there = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    there += [path.relative_to(ROOT / "docs").as_posix() for path in NOTEBOOKS]
    assert sorted(listed) == sorted({*there, "index.md", "changelog.md"} - {"images/README.md"})
    for page in listed:
        assert (site / re.sub(r"\.\w+$", ".html", page)).exists(), page


def test_every_internal_link_resolves(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":  # 404.html has absolute links
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            missing = not target.exists() or (
                anchor and target in pages and anchor not in pages[target].anchors | {"__top"}
            )
            broken += [f"{path.relative_to(site)}: {link}"] if missing else []
    assert len(pages) > 30 and not broken, "\n".join(broken)


def test_a_page_loads_nothing_from_another_host(site, pages):
    for path, page in pages.items():
        outside = [source for source in page.loaded if urlsplit(source).netloc]
        assert not outside, (path.name, outside)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet.name


def test_the_search_finds_settings_commands_and_names(site):
    index = (site / "search/search_index.json").read_text()
    for word in ("short_episodes", "stam compare", "WindowSensor", "check_looker", "Add your own"):
        assert word in index, word
    assert "source/src" not in index


def test_the_reference_has_every_public_name():
    named = set(re.findall(r"^::: (\S+)", "\n".join(p.read_text() for p in ROOT.glob("docs/api/*.md")), re.M))
    missing = {f"stam.{name}" for name in stam.__all__} | {f"stam.live.{name}" for name in stam.live.__all__}
    missing -= named | {"stam.weights", "stam.StamError"}  # a module; listed where it is defined
    assert not missing and "stam.errors.StamError" in named


def test_the_notebooks_run(tmp_path):
    """All in one kernel, which imports torch once; the names of one are not there for the next."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    together = nbformat.v4.new_notebook()
    for path in NOTEBOOKS:
        together.cells += [*nbformat.read(path, 4).cells, nbformat.v4.new_code_cell("%reset -f")]
    assert len(NOTEBOOKS) == 3
    settings = {"STAM_QUICK_NOTEBOOKS": "1", "PYTHONPATH": str(ROOT / "src")}
    kernel = nbclient.NotebookClient(together, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        kernel.execute()
    said = "".join(output.get("text", "") for cell in together.cells for output in cell.get("outputs", []))
    for words in ("church", "glimpses  learned   spiral   random", "instead of 4.9 s for whole scenes"):
        assert words in said


def test_the_notebooks_are_small_and_name_no_folder_of_a_machine():
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 300_000
    for path in NOTEBOOKS:
        assert not re.search(r"/(tmp|home|root|work|Users)/", path.read_text()), path.name
