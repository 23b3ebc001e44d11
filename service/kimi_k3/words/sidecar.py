# SPDX-License-Identifier: Apache-2.0
"""Where the sidecar is, and what opens it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import read_small
from kimi_k3.words.environment import SIDECAR_PREFIX

TOKEN = SIDECAR_PREFIX + "TOKEN"
TOKEN_FILE = TOKEN + "_FILE"
MAX_TOKEN_BYTES = 64 * 1024


def sidecar_url(given: str) -> str:
    """The sidecar's address without a slash at its end; ``host:port`` is taken for ``http``.

    Raises:
        OperatorError: it is not such an address, or holds a password, which would be shown.
    """
    text = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _bad(given, str(error)) from None
    if "@" in parts.netloc:
        raise OperatorError(
            "the sidecar's URL holds a user or password",
            remedy=f"give a token with --token-file or {TOKEN_FILE}",
            exit_code=ExitCode.USAGE,
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise _bad(given, "is not http://HOST:PORT")
    if not text.isprintable() or not text.isascii() or " " in text or parts.query or parts.fragment:
        raise _bad(given, "is not http://HOST:PORT")
    return text.rstrip("/")


def read_token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token of ``--token-file``, else of the variables that the sidecar reads, else ``None``.

    Raises:
        OperatorError: the file cannot be read, or holds no token that a header can carry. Never quotes it.
    """
    named = environment.get(TOKEN_FILE)
    if file is not None:
        return _of_file(file, f"--token-file {file}")
    if named:
        return _of_file(Path(named), f"{TOKEN_FILE} {named}")
    if environment.get(TOKEN):
        return _checked(environment[TOKEN], f"environment variable {TOKEN}")
    return None


def _of_file(file: Path, source: str) -> str:
    try:
        return _checked(read_small(file, limit=MAX_TOKEN_BYTES).decode("ascii"), source)
    except UnicodeDecodeError:
        raise _no_token(source, "is not text") from None
    except OSError as error:
        raise _no_token(source, f"cannot be read: {error.strerror or 'error'}") from None


def _checked(text: str, source: str) -> str:
    token = text.strip()
    if not token:
        raise _no_token(source, "is empty")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise _no_token(source, "has characters that an HTTP header cannot carry")
    return token


def _no_token(source: str, why: str) -> OperatorError:
    return OperatorError(
        f"the sidecar's token: {source} {why}",
        remedy="give a file that holds the one line that the sidecar was given",
        exit_code=ExitCode.USAGE,
    )


def _bad(given: str, why: str) -> OperatorError:
    return OperatorError(
        f"the sidecar's URL {given!r}: {why}",
        remedy="give one such as http://127.0.0.1:8001",
        exit_code=ExitCode.USAGE,
    )
