"""Lets the site show the repository's documents as they are: mkdocs calls these functions (see mkdocs.yml).

Documents link to each other and to source files by paths that work where the repository is browsed. The site
holds only `docs/`, so README and changelog become pages, and so does every source file that a page links to.
"""

import ast
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES_OF_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}  # file in the repository: page
LINK = re.compile(r"(?<=\]\()([^)#\s]+)")
FENCE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that do not lie in `docs/`."""
    for document, page in PAGES_OF_ROOT.items():
        front = "---\nhide:\n  - navigation\n---\n\n" if page == "index.md" else ""
        files.append(File.generated(config, page, content=front + (ROOT / document).read_text()))
    linked = {
        target
        for file in files.documentation_pages()
        if file.src_uri.endswith(".md")
        for target in links_of(file.content_string, file.src_uri)
        if not _in_site(target)
    }
    for target in sorted(linked):
        files.append(_source_file(target, config))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to other files of the repository into links to their pages."""
    here = page.file.src_uri
    if here.startswith("source/") or not here.endswith(".md"):
        return markdown
    kept, position = [], 0
    for fence in FENCE.finditer(markdown):
        kept += [_rewritten(markdown[position : fence.start()], here), fence.group()]
        position = fence.end()
    return "".join([*kept, _rewritten(markdown[position:], here)])


def links_of(markdown: str, page: str) -> Iterator[str]:
    """Yields the repository path of every file a page links to."""
    for link in LINK.findall(FENCE.sub("", markdown)):
        if not re.match(r"[a-z]+:", link):
            yield _in_repository(link, page)


def _rewritten(text: str, page: str) -> str:
    def new_link(match: re.Match) -> str:
        link = match.group()
        if re.match(r"[a-z]+:", link):
            return link
        return os.path.relpath(_page_of(_in_repository(link, page)), Path(page).parent)

    return LINK.sub(new_link, text)


def _in_repository(link: str, page: str) -> str:
    """Returns the path in the repository of what a page links to."""
    document = {page: name for name, page in PAGES_OF_ROOT.items()}.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def _in_site(path: str) -> bool:
    return path in PAGES_OF_ROOT or path.startswith("docs/")


def _page_of(path: str) -> str:
    """Returns where the site has a file of the repository."""
    if _in_site(path):
        return PAGES_OF_ROOT.get(path, path.removeprefix("docs/"))
    return f"source/{path}.md" if _is_shown(path) else f"source/{path}"


def _is_shown(path: str) -> bool:
    return path.endswith(".py") or (ROOT / path).is_dir()


def _source_file(path: str, config: MkDocsConfig) -> File:
    """Returns source as a page of code, a folder as a page of its files, and anything else as it is."""
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page links to {path}, which is not in the repository")
    if not _is_shown(path):
        return File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path))
    front = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    body = _listing(ROOT / path) if (ROOT / path).is_dir() else _code(ROOT / path)
    return File.generated(config, _page_of(path), content=front + body)


def _code(file: Path) -> str:
    return f"````python\n{file.read_text()}````\n"


def _listing(folder: Path) -> str:
    """Lists the files of a folder with the first line of what they say of themselves."""
    rows = []
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("_", ".")):
            continue
        about = ast.get_docstring(ast.parse(file.read_text())) if file.suffix == ".py" else None
        rows.append(f"| `{file.name}{'/' if file.is_dir() else ''}` | {(about or '').split(chr(10))[0]} |")
    return "\n".join(["| file | |", "|---|---|", *rows]) + "\n"
