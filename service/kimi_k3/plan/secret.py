# SPDX-License-Identifier: Apache-2.0
"""The API key: where it comes from. It is never printed, not even in part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.launch import VLLM_API_KEY
from kimi_k3.words.environment import API_KEY
from kimi_k3.words.secret import checked_secret, read_secret

_WHAT = "API key"


def read_api_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The key of ``--api-key-file``, else of ``KIMI_K3_API_KEY``, else ``None`` (no authentication).

    Raises:
        OperatorError: the file cannot be read or is no regular file; the key is empty, has several lines
            or characters that no HTTP header can carry; or the key was given by vLLM's own variable.
    """
    if file is not None:
        return read_secret(file, what=_WHAT, source=f"--api-key-file {file}", variable=API_KEY)
    if API_KEY in environment:
        return checked_secret(environment[API_KEY], what=_WHAT, source=f"environment variable {API_KEY}")
    if environment.get(VLLM_API_KEY):
        raise OperatorError(
            f"environment variable {VLLM_API_KEY} is set: the supervisor would not know the key it needs "
            "for its own first completion",
            remedy=f"set {API_KEY} or --api-key-file instead",
            exit_code=ExitCode.USAGE,
        )
    return None
