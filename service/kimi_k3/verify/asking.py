# SPDX-License-Identifier: Apache-2.0
"""Asking the deployment: what it says of itself, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from kimi_k3.errors import OperatorError
from kimi_k3.sidecar.status import Status
from kimi_k3.verify.keeping import Broken
from kimi_k3.verify.results import Subject
from kimi_k3.verify.target import Target
from kimi_k3.watch.client import NoAnswer, NotUnderstood, Sidecar
from kimi_k3.words.text import printable

ANSWER_SECONDS = 600.0
"""A first request may compile kernels, and a busy engine lets the next one wait."""

MAX_SHOWN = 200
"""Characters of somebody else's text in a line."""


def subject_of(target: Target) -> Subject:
    """What the deployment says of itself.

    Raises:
        OperatorError: it cannot be asked, or serves other weights than it should.
    """
    if target.sidecar is None:
        with api(target) as engine:
            return Subject(engine=target.engine, model=engine.model)
    sidecar = Sidecar(target.sidecar, target.token, target.authorities)
    try:
        status = sidecar.ask("/status", Status)
    except (NoAnswer, NotUnderstood) as error:
        raise OperatorError(
            f"the sidecar at {target.sidecar}: {error}",
            remedy="start it, give its URL with --sidecar, or --no-sidecar to do without what it tells",
        ) from None
    finally:
        sidecar.close()
    if status.deployment is None or status.weights is None:
        raise OperatorError(
            f"the sidecar at {target.sidecar} knows of no deployment",
            remedy="start the engine with the same state directory, or give --no-sidecar",
        )
    if target.weights not in (None, status.weights.weights):
        raise OperatorError(
            f"{status.weights.weights} is served at {target.engine}, and {target.weights} was asked for",
            remedy="give the URLs of the right deployment, or other --weights",
        )
    return Subject(
        engine=target.engine,
        model=status.deployment.served_model_name,
        checkpoint=status.deployment.checkpoint.name,
        profile=status.deployment.profile,
        weights=status.weights.weights,
        rule=status.weights.scale_rule,
        ranks=status.deployment.world_size,
        hardware=status.deployment.hardware,
        versions=status.deployment.versions,
    )


class Api:
    """The OpenAI API of the deployment."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self.model = model
        """Name of the model that is asked, the first that the server lists."""

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that the server answers with.

        Raises:
            Broken: it does not answer, or with an error.
        """
        return _answer(lambda: self._client.post(path, json={"model": self.model, **body}), path)

    def length_limit(self) -> int | None:
        """Tokens of the longest context, where the server tells (vLLM does).

        Raises:
            Broken: it does not answer, or lists no model.
        """
        found = self._card().get("max_model_len")
        return found if isinstance(found, int) else None

    def checkpoint_path(self) -> str | None:
        """Where the server read the model from, by its own word and on its own disk (vLLM tells).

        Raises:
            Broken: it does not answer, or lists no model.
        """
        found = self._card().get("root")
        return found if isinstance(found, str) else None

    def _card(self) -> Mapping[str, Any]:
        found = _answer(lambda: self._client.get("/v1/models"), "/v1/models")
        try:
            card = found["data"][0]
        except (KeyError, IndexError, TypeError):
            card = None
        if not isinstance(card, dict):
            raise Broken(f"/v1/models: lists no model: {shown(str(found))}")
        return card


@contextmanager
def api(target: Target) -> Iterator[Api]:
    """Requests to the deployment's API, from any number of threads.

    Raises:
        OperatorError: it does not answer now.
    """
    with httpx.Client(
        base_url=target.engine,
        headers=target.headers,
        timeout=httpx.Timeout(ANSWER_SECONDS, connect=30.0),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
        verify=target.trusted(target.engine),
    ) as client:
        try:
            model = str(_answer(lambda: client.get("/v1/models"), "/v1/models")["data"][0]["id"])
        except (Broken, KeyError, IndexError, TypeError) as error:
            why = str(error) if isinstance(error, Broken) else "it lists no model"
            raise OperatorError(
                f"the API at {target.engine}: {why}",
                remedy="start the engine, or give its URL with --engine and its key with --api-key-file",
            ) from None
        yield Api(client, model)


def _answer(ask: Any, path: str) -> Any:
    try:
        response = ask()
    except httpx.TimeoutException:
        raise Broken(f"{path}: no answer within {ANSWER_SECONDS:.0f} s") from None
    except httpx.HTTPError as error:
        raise Broken(f"{path}: the server is gone ({shown(str(error)) or type(error).__name__})") from None
    if response.status_code != httpx.codes.OK:
        raise Broken(f"{path}: HTTP {response.status_code}: {shown(response.text)}")
    try:
        return response.json()
    except ValueError:
        raise Broken(f"{path}: no JSON: {shown(response.text)}") from None


def shown(text: str) -> str:
    """Somebody else's text, fit for one line."""
    return printable(" ".join(text.split()))[:MAX_SHOWN]
