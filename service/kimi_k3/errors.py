# SPDX-License-Identifier: Apache-2.0
"""The one kind of error an operator sees: a single line that names the thing and the remedy.

Every room raises :class:`OperatorError` for anything the operator can mend; the command line prints
its text on one line and exits with its code. Anything else that escapes is a defect of ours and
keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of ``kimi-k3``; supervisors, units and charts may rely on them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CONSENT = 3
    BAD_CHECKPOINT = 4
    IN_USE = 5
    STATE = 6
    ENGINE = 7
    INTERRUPTED = 130
    READER_GONE = 141


class OperatorError(Exception):
    """Something the operator can mend.

    Args:
        what: the thing that is wrong and where, e.g. ``"checkpoint /models/k3: 1 of 96 shards missing"``.
        remedy: what to do about it, in the imperative.
        exit_code: the process exit code that goes with it.
    """

    def __init__(self, what: str, *, remedy: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.exit_code = exit_code

    def __str__(self) -> str:
        """The one line an operator reads."""
        return " ".join(f"{self.what}; {self.remedy}".split())


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint ``did you mean ...`` for an unknown name, or the list of known ones."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(choices)}"
