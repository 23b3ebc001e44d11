# SPDX-License-Identifier: Apache-2.0
"""One completion before a start counts as ready.

``/health`` says 200 before the first request has run: a model whose attention the device cannot
compute fails only then.
"""

from __future__ import annotations

import time

import httpx

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import Canary
from kimi_k3.journal.writer import now
from kimi_k3.supervisor.engine_client import engine_client
from kimi_k3.supervisor.redact import Secrets

MAX_TOKENS = 4
ATTEMPTS = 3
MAX_QUOTED = 300
"""Characters of the engine's answer that are quoted in a message."""


def ask_canary(
    engine_url: str,
    model: str,
    *,
    api_key: str | None,
    timeout: float,
    pause: float = 1.0,
    transport: httpx.BaseTransport | None = None,
) -> Canary:
    """Ask for one short completion.

    A 4xx ends it at once, the request will not get better; lost connections and 5xx are tried
    ``ATTEMPTS`` times, ``pause`` seconds apart.

    Args:
        timeout: seconds for each answer; the first request may have to compile kernels.

    Raises:
        OperatorError: no answer, an error, or an answer without a token.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    problem = ""
    with engine_client(engine_url, timeout=timeout, headers=headers, transport=transport) as client:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(pause)
            begun = time.monotonic()
            try:
                answer = client.post("/v1/chat/completions", json=body)
            except httpx.HTTPError as error:
                problem = f"no answer ({type(error).__name__}: {error})"
                continue
            seconds = time.monotonic() - begun
            if answer.status_code == 200:
                return Canary(at=now(), seconds=seconds, completion_tokens=_tokens(answer))
            problem = f"HTTP {answer.status_code}: {answer.text[:MAX_QUOTED]}"
            if answer.status_code < 500:
                break
    raise _failed(Secrets([api_key]).hide(problem))


def _tokens(answer: httpx.Response) -> int:
    try:
        tokens = answer.json()["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        raise _failed("an answer that is not a chat completion with its usage") from None
    if not isinstance(tokens, int) or tokens < 1:
        raise _failed("an answer without a single token")
    return tokens


def _failed(problem: str) -> OperatorError:
    return OperatorError(
        f"the first completion failed: {problem}",
        remedy="read engine.log for the error behind it",
        exit_code=ExitCode.ENGINE,
    )
