# SPDX-License-Identifier: Apache-2.0
"""Paths and words as an operator gave them: fit for a journal, for JSON and for another process."""

from __future__ import annotations

import os
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError


def given_path(source: str, text: str, *, absolute: bool = False) -> Path:
    """The path that ``text`` names, with ``~`` replaced by a home directory.

    Args:
        source: what gave it, e.g. ``--state-dir``.
        absolute: put the current directory before a relative path.

    Raises:
        OperatorError: it is empty (which pathlib takes for the current directory), is not UTF-8, or
            begins with the home of nobody.
    """
    if not text:
        raise _usage(
            f"{source}: is empty", 'name a path; an unset shell variable may be behind it, as in "$DIR"'
        )
    # Not Path.expanduser: pathlib forgets the "./" that keeps a name with a tilde from being a home.
    expanded = os.path.expanduser(require_text(source, text))  # noqa: PTH111
    if text.startswith("~") and expanded == text:
        raise _usage(
            f"{source} {text!r}: there is no home directory of {text.partition('/')[0]!r}",
            "write the path without ~, or with ./ before it if the name has one",
        )
    path = Path(expanded)
    if absolute:
        try:
            path = path.absolute()
        except OSError:
            raise _usage(
                f"{source} {text!r}: the current directory is gone", "change to one that exists"
            ) from None
    # The home and the current directory may have names of their own kind.
    require_text(source, str(path))
    return path


def require_text(source: str, text: str) -> str:
    """``text``, if it is text: Python carries other bytes of the command line in disguise.

    Raises:
        OperatorError: it is not UTF-8, so neither the journal nor the API could hold it.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _usage(
            f"{source} {text!r}: is not UTF-8, and neither the journal nor the API can hold it",
            "give another one, or rename it",
        ) from None
    return text


def _usage(what: str, remedy: str) -> OperatorError:
    return OperatorError(what, remedy=remedy, exit_code=ExitCode.USAGE)
