"""What every page is made of: its frame, sections, tables, charts in two themes, downloads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from matplotlib.figure import Figure

from stam.show.figures import data_uri, to_bytes

# A page that asks for nothing from anywhere.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


BAND = "The band is the 95 % interval over images."  # in every chart that has one


class Charts:
    """The charts of a page, each in a light and a dark version."""

    def __init__(self, light: Mapping[str, Figure], dark: Mapping[str, Figure]) -> None:
        self._light, self._dark = light, dark

    def card(self, name: str, caption: str, data: str = "") -> str:
        """Returns one chart with its caption and the numbers behind it; nothing where it was not drawn."""
        if name not in self._light:
            return ""
        bright, dim = (
            data_uri(to_bytes(figures[name], "svg", transparent=True), "image/svg+xml")
            for figures in (self._light, self._dark)
        )
        return (
            f'<figure class="card" id="{name}"><picture><source srcset="{dim}" '
            f'media="(prefers-color-scheme: dark)"><img src="{bright}" alt="{escape(caption)}"></picture>'
            f"<figcaption>{escape(caption)}</figcaption>{folded('Data', data)}</figure>"
        )


@dataclass(frozen=True)
class Section:
    """A part of a page: its address within the page, its title, and its content as HTML."""

    key: str
    title: str
    content: str


def page(title: str, lead: str, tiles: str, sections: Iterable[Section], downloads: str) -> str:
    """Returns a whole page; a section without content is left out."""
    style = files("stam.show.report").joinpath("style.css").read_text()
    shown = [section for section in sections if section.content]
    links = "".join(f'<a href="#to-{each.key}">{escape(each.title)}</a>' for each in shown)
    body = "\n".join(
        f'<section id="to-{each.key}"><h2>{escape(each.title)}</h2>{each.content}</section>' for each in shown
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}: STAM report</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="muted">{escape(lead)}</p>
<nav>{links}</nav>
{tiles}
{body}
<p class="muted">Download: {downloads}</p>
</main>
</body>
</html>
"""


def cards(*each: str) -> str:
    """Lays charts beside each other where there is room."""
    shown = [card for card in each if card]
    return f'<div class="cards">{"".join(shown)}</div>' if shown else ""


def paragraph(text: str) -> str:
    """Returns a paragraph of text."""
    return f"<p>{escape(text)}</p>"


def folded(title: str, content: str, scroll: bool = True) -> str:
    """Returns content that shows when its title is clicked; nothing without content."""
    if not content:
        return ""
    inner = f'<div class="scroll">{content}</div>' if scroll else content
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def download(name: str, text: str, media_type: str, label: str) -> str:
    """Returns a link to a file that the page itself holds."""
    return f'<a download="{name}" href="{data_uri(text.encode(), media_type)}">{escape(label)}</a>'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], text_columns: Sequence[int] = ()) -> str:
    """Returns an HTML table; numbers to the right, the named columns to the left."""

    def line(tag: str, values: Sequence[Any]) -> str:
        marks = [' class="text"' if column in text_columns else "" for column in range(len(values))]
        found = zip(marks, values, strict=True)
        return "".join(f"<{tag}{mark}>{escape(str(value))}</{tag}>" for mark, value in found)

    body = "".join(f"<tr>{line('td', list(row))}</tr>" for row in rows)
    return f"<table><thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def wide_table(head: Sequence[str], rows: Iterable[Sequence[Any]], text_columns: Sequence[int] = ()) -> str:
    """Returns a table of a few words a cell; on a narrow screen each row becomes a list of its own."""
    kinds = [' class="text"' if column in text_columns else "" for column in range(len(head))]

    def cell(column: int, value: Any) -> str:
        return (
            f'<td{kinds[column]} data-label="{escape(head[column])}"><span>{escape(str(value))}</span></td>'
        )

    names = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "".join(f"<tr>{''.join(cell(*pair) for pair in enumerate(row))}</tr>" for row in rows)
    return f'<table class="wide"><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>'


def tile(value: str, meaning: str) -> str:
    """Returns one large number with what it means."""
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(meaning)}</span></div>'


def percent(value: float, digits: int = 1) -> str:
    """Returns a share as per cent."""
    return f"{100 * value:.{digits}f} %"


def number(value: float) -> str:
    """Returns a share as per cent for a table, without the sign."""
    return f"{100 * value:.2f}"


def count_of(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
