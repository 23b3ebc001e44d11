# SPDX-License-Identifier: Apache-2.0
"""What this room says about foreign files: on one line, and harmless to the terminal that shows it."""

from __future__ import annotations

from kimi_k3.errors import ExitCode, OperatorError


def printable(text: str) -> str:
    r"""``text`` with every unprintable character as Python's ``repr`` writes it, e.g. ``\x1b`` or ``\ud800``.

    Names in a checkpoint come from outside: an escape sequence would steer the terminal, a newline would
    forge a line of its own, and a lone surrogate cannot be encoded at all. Applying it twice changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def bad_checkpoint(what: str, remedy: str) -> OperatorError:
    """The error for a checkpoint that cannot be used; ``what`` may hold foreign text."""
    return OperatorError(printable(what), remedy=remedy, exit_code=ExitCode.BAD_CHECKPOINT)
