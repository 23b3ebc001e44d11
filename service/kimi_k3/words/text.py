# SPDX-License-Identifier: Apache-2.0
"""Text that comes from outside, for one line of a terminal, a log or an answer."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""``text`` with every unprintable character as Python's ``repr`` writes it, e.g. ``\x1b`` or ``\ud800``.

    An escape sequence would steer the terminal, a newline would forge a line of its own, and a lone surrogate
    cannot be encoded at all. Applying it twice changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
