# SPDX-License-Identifier: Apache-2.0
"""Patterns of the catalogue: simple enough to be quick on any line, each with words to look for first. Pure.

A log of a gigabyte is searched for a hundred patterns. Looking for a fixed word is fast, a regular expression
is tried only on lines with its word. So each alternative of a pattern must hold a run of fixed characters,
outside of groups: its anchor. And on a hostile line no pattern may take longer than the square of its length,
so an alternative has one repeat.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MIN_ANCHOR = 6
MAX_REPEATS = 1
"""Unbounded repeats per alternative; each multiplies the time of the worst line by its length."""

_TOKEN = re.compile(
    r"(?P<escaped>\\[^A-Za-z0-9])|(?P<kind>\\[dwsDWSb])|(?P<set>\[\^?\]?[^\]]*\])|(?P<group>\((?:\?:)?)|(?P<close>\))"
    r"|(?P<repeat>[*+])|(?P<maybe>\?)|(?P<either>\|)|(?P<any>\.)|(?P<plain>[^\\\[\](){}*+?|.^$])"
)


class NotSimple(ValueError):
    """The pattern uses something that this catalogue does without."""


def gates(words: Iterable[str]) -> dict[str, list[str]]:
    """The fewest of ``words`` of which each word holds one, with the words that hold it.

    Many signatures hold "Error"; a stretch of log without it needs no look for any of them.
    """
    found: dict[str, list[str]] = {}
    for word in sorted(dict.fromkeys(words), key=len):
        gate = next((gate for gate in found if gate in word), word)
        found.setdefault(gate, []).append(word)
    return found


def anchors(pattern: str) -> tuple[str, ...]:
    """One fixed text per alternative of ``pattern``; a line that matches holds at least one of them.

    Raises:
        NotSimple: an alternative has no fixed text of :data:`MIN_ANCHOR` characters, repeats nest or are too
            many, or the pattern holds more than characters, sets, groups, ``*``, ``+``, ``?`` and ``|``.
    """
    found: list[str] = []
    runs = [""]
    depth = repeats = position = 0
    previous = ""

    def end_alternative() -> None:
        anchor = max(runs, key=len)
        if len(anchor) < MIN_ANCHOR:
            raise NotSimple(f"{pattern!r} has an alternative without {MIN_ANCHOR} fixed characters in a row")
        found.append(anchor)

    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            raise NotSimple(f"{pattern!r} holds {pattern[position]!r}, which patterns here do without")
        kind, text, position = str(token.lastgroup), token[0], token.end()
        if kind in ("repeat", "maybe"):
            if previous in ("repeat", "maybe", "group", "either", "") or (
                previous == "close" and kind == "repeat"
            ):
                raise NotSimple(f"{pattern!r} repeats a group, a repeat or nothing")
            if depth == 0 and previous in ("plain", "escaped"):
                # The repeated character itself may be missing.
                runs[-1] = runs[-1][:-1]
            repeats += kind == "repeat"
            if repeats > MAX_REPEATS:
                raise NotSimple(f"{pattern!r} has more than {MAX_REPEATS} repeat in an alternative")
            runs.append("")
        elif kind == "either" and depth == 0:
            end_alternative()
            runs, repeats = [""], 0
        elif kind in ("plain", "escaped") and depth == 0:
            runs[-1] += text[-1]
        else:
            depth += (kind == "group") - (kind == "close")
            runs.append("")
        previous = kind
    end_alternative()
    return tuple(found)
