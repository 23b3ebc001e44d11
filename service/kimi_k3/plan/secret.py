# SPDX-License-Identifier: Apache-2.0
"""The API key: where it comes from. It is never printed, not even in part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import read_small
from kimi_k3.plan.launch import VLLM_API_KEY
from kimi_k3.words.environment import API_KEY

MAX_FILE_BYTES = 64 * 1024
"""Far more than a key: more is another file, or a device that never ends."""


def read_api_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The key of ``--api-key-file``, else of ``KIMI_K3_API_KEY``, else ``None`` (no authentication).

    Raises:
        OperatorError: the file cannot be read or is no regular file; the key is empty, has several lines
            or characters that no HTTP header can carry; or the key was given by vLLM's own variable.
    """
    if file is not None:
        source = f"--api-key-file {file}"
        try:
            text = read_small(file, limit=MAX_FILE_BYTES).decode("utf-8")
        except UnicodeDecodeError:
            raise _bad(source, "is not text") from None
        except OSError as error:
            raise OperatorError(
                f"API key: {source} cannot be read: {error.strerror or 'error'}",
                remedy=f"give a file that holds one line, or set {API_KEY}",
                exit_code=ExitCode.USAGE,
            ) from None
        return _checked(text, source)
    if API_KEY in environment:
        return _checked(environment[API_KEY], f"environment variable {API_KEY}")
    if environment.get(VLLM_API_KEY):
        raise OperatorError(
            f"environment variable {VLLM_API_KEY} is set: the supervisor would not know the key it needs "
            "for its own first completion",
            remedy=f"set {API_KEY} or --api-key-file instead",
            exit_code=ExitCode.USAGE,
        )
    return None


def _checked(text: str, source: str) -> str:
    key = text.strip()
    if not key:
        raise _bad(source, "is empty")
    if len(key.splitlines()) > 1:
        raise _bad(source, "has more than one line")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise _bad(source, "has characters that an HTTP header cannot carry (allowed: visible ASCII)")
    return key


def _bad(source: str, why: str) -> OperatorError:
    return OperatorError(
        f"API key: {source} {why}",
        remedy="give one line of visible ASCII, or leave it out to serve without a key",
        exit_code=ExitCode.USAGE,
    )
