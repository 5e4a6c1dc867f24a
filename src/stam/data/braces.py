"""Brace patterns, as a shell expands them: `train-{000000..000099}.tar`, `{train,val}-0.tar`, also nested."""

import re
from collections.abc import Iterator

from stam.errors import DataError

_MOST_NAMES = 100_000
_RANGE = re.compile(r"(\d{1,12})\.\.(\d{1,12})")


def has_braces(pattern: str) -> bool:
    """Tells whether there is anything to expand."""
    return "{" in pattern


def expand_braces(pattern: str) -> list[str]:
    """Returns the names that a pattern stands for, in its order; a name without braces stands for itself.

    Raises:
        DataError: A brace is not closed or holds neither a range nor a list, or there are too many names.
    """
    names: list[str] = []
    for name in _expand(pattern, pattern):
        names.append(name)
        if len(names) > _MOST_NAMES:
            raise DataError(f"'{pattern:.80}' stands for more than {_MOST_NAMES} names: use fewer shards")
    return names


def _expand(text: str, pattern: str) -> Iterator[str]:
    start = text.find("{")
    if start < 0:
        yield text
        return
    parts, end = _parts(text, start, pattern)
    choices: Iterator[str] | list[str]
    if len(parts) > 1:
        choices = (choice for part in parts for choice in _expand(part, pattern))
    elif bounds := _RANGE.fullmatch(parts[0]):
        choices = _count(bounds[1], bounds[2])
    else:
        wanted = "expected a range such as {000..099} or a list such as {train,val}"
        raise DataError(f"cannot read '{{{parts[0]:.40}}}' in '{pattern:.80}': {wanted}")
    for choice in choices:
        for rest in _expand(text[end:], pattern):
            yield text[:start] + choice + rest


def _parts(text: str, start: int, pattern: str) -> tuple[list[str], int]:
    """Splits what is between a brace and the one that closes it at its own commas; returns where it ends."""
    depth, begin = 0, start + 1
    parts = []
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if (text[place] == "," and depth == 1) or depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
        if depth == 0:
            return parts, begin
    raise DataError(f"a brace in '{pattern:.80}' is not closed: add '}}'")


def _count(first: str, last: str) -> Iterator[str]:
    """Counts up or down; numbers with leading zeros keep their width."""
    padded = (len(first) > 1 and first[0] == "0") or (len(last) > 1 and last[0] == "0")
    width = max(len(first), len(last)) if padded else 0
    step = 1 if int(first) <= int(last) else -1
    for number in range(int(first), int(last) + step, step):
        yield f"{number:0{width}d}"
