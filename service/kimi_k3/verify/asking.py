# SPDX-License-Identifier: Apache-2.0
"""Asking the deployment: what it says of itself, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from kimi_k3.engine.loss_header import HEADER
from kimi_k3.errors import OperatorError
from kimi_k3.sidecar.status import ServedWeights, Status
from kimi_k3.verify.keeping import Broken
from kimi_k3.verify.results import Subject
from kimi_k3.verify.target import Target
from kimi_k3.watch.client import NoAnswer, NotUnderstood, Sidecar
from kimi_k3.words.text import printable

MODELS = "/v1/models"
ANSWER_SECONDS = 600.0
"""A first request may compile kernels, and a busy engine lets the next one wait."""

LISTING_SECONDS = 60.0
"""For what costs the server nothing: one that is silent for so long has no ear for questions either."""

MAX_SHOWN = 200
"""Characters of somebody else's text in a line."""


def subject_of(target: Target) -> Subject:
    """What the deployment says of itself.

    Raises:
        OperatorError: it cannot be asked, serves other weights than it should, or sidecar and API are not of
            one deployment.
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
    _require_one_deployment(target, status.deployment.served_model_name, status.weights)
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


def _require_one_deployment(target: Target, model: str, served: ServedWeights) -> None:
    """By the model's name, and by the header of lossy weights: under wrong weights a result misleads.

    Raises:
        OperatorError: sidecar and API contradict each other, or the API does not answer.
    """
    with api(target) as engine:
        if engine.model != model:
            differ = f"serves {model}", f"serves {shown(engine.model)}"
        elif engine.lossy is not served.weights.lossy:
            says = {True: "says that its weights are lossy", False: "does not say that its weights are lossy"}
            differ = f"says that {served.weights} is served", says[engine.lossy]
        else:
            return
    raise OperatorError(
        f"the sidecar at {target.sidecar} {differ[0]}, and the API at {target.engine} {differ[1]}",
        remedy="give --engine and --sidecar of one deployment, or --no-sidecar",
    )


class Api:
    """The OpenAI API of the deployment."""

    def __init__(self, client: httpx.Client, model: str, *, lossy: bool) -> None:
        self._client = client
        self.model = model
        """Name of the model that is asked, the first that the server lists."""
        self.lossy = lossy
        """Whether its answers say that they come from lossy weights."""

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that the server answers with.

        Raises:
            Broken: it does not answer, or with an error.
        """
        content = {"model": self.model, **body}
        return _json(
            _response(lambda: self._client.post(path, json=content), path, seconds=ANSWER_SECONDS), path
        )

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
        return _first_model(_listing(self._client))


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
            listing = _listing(client)
            model = str(_first_model(listing)["id"])
        except Broken as error:
            raise OperatorError(
                f"the API at {target.engine}: {error}",
                remedy="start the engine, or give its URL with --engine and its key with --api-key-file",
            ) from None
        yield Api(client, model, lossy=HEADER in listing.headers)


def _listing(client: httpx.Client) -> httpx.Response:
    return _response(lambda: client.get(MODELS, timeout=LISTING_SECONDS), MODELS, seconds=LISTING_SECONDS)


def _first_model(listing: httpx.Response) -> Mapping[str, Any]:
    found = _json(listing, MODELS)
    try:
        card = found["data"][0]
    except (KeyError, IndexError, TypeError):
        card = None
    if not isinstance(card, dict) or not isinstance(card.get("id"), str):
        raise Broken(f"{MODELS}: lists no model: {shown(str(found))}")
    return card


def _response(ask: Callable[[], httpx.Response], path: str, *, seconds: float) -> httpx.Response:
    try:
        response = ask()
    except httpx.TimeoutException:
        raise Broken(f"{path}: no answer within {seconds:.0f} s") from None
    except httpx.HTTPError as error:
        raise Broken(f"{path}: the server is gone ({shown(str(error)) or type(error).__name__})") from None
    if response.status_code != httpx.codes.OK:
        raise Broken(f"{path}: HTTP {response.status_code}: {shown(response.text)}")
    return response


def _json(response: httpx.Response, path: str) -> Any:
    try:
        return response.json()
    except ValueError:
        raise Broken(f"{path}: no JSON: {shown(response.text)}") from None


def shown(text: str) -> str:
    """Somebody else's text, fit for one line."""
    return printable(" ".join(text.split()))[:MAX_SHOWN]
