# SPDX-License-Identifier: Apache-2.0
"""What a deployment says of itself, and answers that are none."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.engine.loss_header import HEADER
from kimi_k3.errors import OperatorError
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from kimi_k3.verify import asking
from kimi_k3.verify.asking import api, subject_of
from kimi_k3.verify.results import Subject
from kimi_k3.words.weights import Weights
from tests.sidecar.builders import lossless, lossy, write
from tests.sidecar.serving import serving
from tests.verify.openai_server import CARD, Server, running

LOSSY = {HEADER: "int4_per_group_32; lossy"}
ANOTHER_NAME = {**CARD, "id": "another"}


def told(directory: Path, seen: Journal, server: Server) -> Subject:
    """What is made of a sidecar over a journal, and of a server."""
    write(directory, seen)
    with running(server), serving(create_app(Settings(state_dir=directory, refresh_seconds=0))) as url:
        return subject_of(replace(server.target, sidecar=url))


def test_sidecar_and_api_agree(tmp_path: Path) -> None:
    """Exact weights without the header, lossy ones with it."""
    (tmp_path / "exact").mkdir()
    exact = told(tmp_path / "exact", lossless(), Server(lambda _: (200, "{}")))
    lossy_one = told(tmp_path, lossy(), Server(lambda _: (200, "{}"), headers=LOSSY))
    assert (exact.weights, lossy_one.weights) == (Weights.MXFP4, Weights.INT4)


@pytest.mark.parametrize(
    ("seen", "changes", "said"),
    [
        (lossless(), {"headers": LOSSY}, "says that mxfp4 is served, and .* says that its weights are lossy"),
        (lossy(), {}, "says that int4 is served, and .* does not say that its weights are lossy"),
        (lossless(), {"card": ANOTHER_NAME}, "serves kimi-k3, and .* serves another"),
    ],
    ids=["exact", "lossy", "another model"],
)
def test_the_sidecar_of_another_engine(
    seen: Journal, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Its word would put all that is measured under the wrong weights, and nobody would see it later."""
    with pytest.raises(OperatorError, match=said) as caught:
        told(tmp_path, seen, Server(lambda _: (200, "{}"), **changes))
    assert "--sidecar of one deployment" in str(caught.value)


@pytest.mark.parametrize(
    ("listing", "said"),
    [
        ((200, "<html>\x1b[31m\nhello"), "no JSON: <html>"),
        ((500, '{"error":\n"boom"}'), "HTTP 500: .*boom"),
        ((429, "slow down"), "HTTP 429: slow down"),
        ((401, '{"error": "Unauthorized"}'), "HTTP 401: .*--api-key-file"),
        ((200, "null"), "lists no model: None"),
        ((200, '{"data": []}'), "lists no model"),
        ((200, '{"data": [{"max_model_len": 9}]}'), "lists no model"),
        ((200, '{"data": ["kimi-k3"]}'), "lists no model"),
    ],
)
def test_a_listing_that_is_none(listing: tuple[int, str], said: str) -> None:
    """Whatever stands at the URL: one printable line, with what to do."""
    with (
        running(Server(lambda _: None, listing=listing)) as server,
        pytest.raises(OperatorError, match=said) as caught,
        api(server.target),
    ):
        raise AssertionError
    assert str(caught.value).isprintable()


def test_a_silent_server_is_not_waited_for_as_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes are for a first answer, which may compile kernels; a list of models costs nothing."""
    monkeypatch.setattr(asking, "LISTING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Server(lambda _: None, url=f"http://127.0.0.1:{silent.getsockname()[1]}").target
        with pytest.raises(OperatorError, match="/v1/models: no answer within"), api(target):
            raise AssertionError
