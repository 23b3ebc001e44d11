# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 verify smoke``: from outside, whether a deployment answers, is watched and tells its loss.

For ``helm test`` and for hands: every check is one line, and the first that fails does not end the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kimi_k3.engine.loss_header import HEADER
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.sidecar.status import Deployment, ServedWeights, Status
from kimi_k3.sidecar.warning import LOSSY_WEIGHTS, Warnings
from kimi_k3.verify.asking import shown
from kimi_k3.verify.results import Row, State
from kimi_k3.verify.target import Target
from kimi_k3.watch.client import NoAnswer, NotUnderstood, Sidecar

QUESTION = "What is the capital of France? Answer in one word."
ANSWER_TOKENS = 16
ANSWER_SECONDS = 300.0
"""A first request may compile kernels."""

SCRAPE_SECONDS = 30.0
VLLM_PREFIX = "vllm:"


class Wrong(Exception):
    """A check does not hold; the text is one line."""


def run_smoke(target: Target, *, report: Callable[[str], None]) -> int:
    """Check everything and say of each what was found; 0 if all holds, else 1.

    Raises:
        OperatorError: the sidecar wants another token, or there is none.
    """
    if target.sidecar is None:
        raise OperatorError(
            "verify smoke: --no-sidecar leaves nothing to compare with",
            remedy="give the sidecar's URL with --sidecar",
            exit_code=ExitCode.USAGE,
        )
    wrong = 0
    for row in rows(target):
        wrong += row.state is State.FAIL
        report(f"{'wrong' if row.state is State.FAIL else 'ok':<6}{row.name}: {row.evidence}")
    return ExitCode.FAILED if wrong else ExitCode.OK


def rows(target: Target) -> Iterator[Row]:
    """What each check found, as it is made."""
    for name, check in checks(target):
        try:
            yield Row(name=name, state=State.PASS, evidence=check())
        except Wrong as error:
            yield Row(name=name, state=State.FAIL, evidence=str(error))


def checks(target: Target) -> Iterator[tuple[str, Callable[[], str]]]:
    """Each check by its name; it returns what it found."""
    assert target.sidecar is not None, "run_smoke has seen to it"
    sidecar_metrics = target.sidecar + "/metrics"
    sidecar = Sidecar(target.sidecar, target.token, target.authorities)
    try:
        yield "readiness", lambda: _readiness(sidecar)
        yield "completion", lambda: _completion(target, sidecar)
        yield "consent", lambda: _consent(target, sidecar)
        yield "sidecar's metrics", lambda: _scrape(target, sidecar_metrics, "kimi_k3_", target.token)
        yield "engine's metrics", lambda: _scrape(target, target.metrics, VLLM_PREFIX, None)
    finally:
        sidecar.close()


def _readiness(sidecar: Sidecar) -> str:
    try:
        found = sidecar.readiness()
    except (NoAnswer, NotUnderstood) as error:
        raise Wrong(str(error)) from None
    if not found.ready:
        raise Wrong(" ".join(reason.message for reason in found.reasons))
    return "ready"


def _served(sidecar: Sidecar) -> tuple[Deployment, ServedWeights]:
    try:
        status = sidecar.ask("/status", Status)
    except (NoAnswer, NotUnderstood) as error:
        raise Wrong(str(error)) from None
    if status.deployment is None or status.weights is None:
        raise Wrong("the sidecar knows of no deployment")
    return status.deployment, status.weights


def _completion(target: Target, sidecar: Sidecar) -> str:
    """A chat completion, with the header that says what it comes from."""
    deployment, served = _served(sidecar)
    body = {
        "model": deployment.served_model_name,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": ANSWER_TOKENS,
    }
    begun = time.monotonic()
    try:
        answer = httpx.post(
            target.engine + "/v1/chat/completions",
            json=body,
            headers=target.headers,
            timeout=ANSWER_SECONDS,
            trust_env=False,
            verify=target.trusted(target.engine),
        )
        tokens = answer.json()["usage"]["completion_tokens"] if answer.status_code == 200 else 0
    except httpx.HTTPError as error:
        raise Wrong(f"no answer ({type(error).__name__}: {shown(str(error))})") from None
    except (ValueError, KeyError, TypeError):
        raise Wrong(f"no chat completion: {shown(answer.text)}") from None
    if answer.status_code != 200:
        raise Wrong(f"HTTP {answer.status_code}: {shown(answer.text)}")
    if not isinstance(tokens, int) or tokens < 1:
        raise Wrong("an answer without a single token")
    if (HEADER in answer.headers) is not served.weights.lossy:
        said = shown(answer.headers.get(HEADER, "nothing"))
        raise Wrong(f"{served.weights} is served, and the answer's {HEADER} says {said}")
    return f"{tokens} tokens in {time.monotonic() - begun:.1f} s"


def _consent(target: Target, sidecar: Sidecar) -> str:
    """That the weights are those that were asked for, and that a loss is told and was consented to."""
    _, served = _served(sidecar)
    if target.weights is not None and served.weights is not target.weights:
        raise Wrong(f"{served.weights} is served, and {target.weights} was asked for")
    try:
        told = {one.code for one in sidecar.ask("/warnings", Warnings).warnings}
    except (NoAnswer, NotUnderstood) as error:
        raise Wrong(str(error)) from None
    if (LOSSY_WEIGHTS.code in told) is not served.weights.lossy:
        raise Wrong(f"{served.weights} is served, and the warnings are {', '.join(sorted(told)) or 'none'}")
    if not served.weights.lossy:
        return f"{served.weights}, lossless"
    if served.consent is None:
        raise Wrong(f"{served.weights} is served, and nobody consented")
    return f"{served.weights}, lossy, by consent ({served.consent})"


def _scrape(target: Target, url: str, prefix: str, token: str | None) -> str:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        answer = httpx.get(
            url, headers=headers, timeout=SCRAPE_SECONDS, trust_env=False, verify=target.trusted(url)
        )
        if answer.status_code != 200:
            raise Wrong(f"HTTP {answer.status_code}")
        families = list(text_string_to_metric_families(answer.text))
    except httpx.HTTPError as error:
        raise Wrong(f"no answer ({type(error).__name__}: {shown(str(error))})") from None
    except ValueError as error:
        raise Wrong(f"not what Prometheus reads: {shown(str(error))}") from None
    found = sum(len(family.samples) for family in families if family.name.startswith(prefix))
    if not found:
        raise Wrong(f"not one series begins with {prefix}")
    return f"{found} series"
