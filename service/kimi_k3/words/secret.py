# SPDX-License-Identifier: Apache-2.0
"""A secret that an HTTP header carries: read and checked; never printed, not even in part."""

from __future__ import annotations

from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import read_small

MAX_FILE_BYTES = 64 * 1024
"""Far more than a secret: more is another file, or a device that never ends."""


def read_secret(file: Path, *, what: str, source: str, variable: str) -> str:
    """The one line that ``file`` holds.

    Args:
        file: where it is.
        what: the secret's name in messages, e.g. ``API key``.
        source: how the operator named the file, e.g. ``--api-key-file key.txt``.
        variable: that may hold the secret instead.

    Raises:
        OperatorError: the file cannot be read or is no regular file, or does not hold a secret.
    """
    try:
        text = read_small(file, limit=MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise _bad(what, source, "is not text") from None
    except OSError as error:
        raise OperatorError(
            f"{what}: {source} cannot be read: {error.strerror or 'error'}",
            remedy=f"give a file that holds one line, or set {variable}",
            exit_code=ExitCode.USAGE,
        ) from None
    return checked_secret(text, what=what, source=source)


def checked_secret(text: str, *, what: str, source: str) -> str:
    """``text`` without white space around it.

    Raises:
        OperatorError: it is empty, has several lines or characters that no HTTP header can carry.
    """
    secret = text.strip()
    if not secret:
        raise _bad(what, source, "is empty")
    if len(secret.splitlines()) > 1:
        raise _bad(what, source, "has more than one line")
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise _bad(what, source, "has characters that an HTTP header cannot carry (allowed: visible ASCII)")
    return secret


def _bad(what: str, source: str, why: str) -> OperatorError:
    return OperatorError(
        f"{what}: {source} {why}",
        remedy="give one line of visible ASCII, or leave it out to serve without a key",
        exit_code=ExitCode.USAGE,
    )
