# SPDX-License-Identifier: Apache-2.0
"""The header that says how lossy an answer is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.engine.loss_header import LossHeader, header_value
from tests.sidecar.builders import (
    START_ID,
    all_conversions,
    journal,
    lossless,
    lossy,
    lossy_rank,
    lossy_supervisor,
    write,
)

HEADER = (b"x-kimi-k3-weights", b"int4_per_group_32; lossy")


def ask(path: str, *, kind: str = "http", root_path: str = "") -> list[dict[str, Any]]:
    """What a client of an application gets that streams two chunks."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        for body in (b"data: 1\n\n", b""):
            await send({"type": "http.response.body", "body": body, "more_body": bool(body)})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    asyncio.run(LossHeader(app)({"type": kind, "path": path, "root_path": root_path}, receive, send))
    return sent


@pytest.mark.parametrize(
    ("path", "root_path"), [("/v1/chat/completions", ""), ("/v1/models", ""), ("/k3/v1/models", "/k3")]
)
def test_every_answer_of_the_api_has_it(path: str, root_path: str) -> None:
    """Beside what was there; the chunks are the ones that were sent."""
    begin, *chunks = ask(path, root_path=root_path)
    assert begin["headers"] == [(b"a", b"b"), HEADER]
    assert [chunk["body"] for chunk in chunks] == [b"data: 1\n\n", b""]


@pytest.mark.parametrize(
    ("path", "kind"), [("/health", "http"), ("/metrics", "http"), ("/v1/x", "websocket")]
)
def test_nothing_else_has_it(path: str, kind: str) -> None:
    """Probes are asked every second, and nobody reads weights there."""
    assert ask(path, kind=kind)[0]["headers"] == [(b"a", b"b")]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("whole", "int4_per_group_32; lossy; rel_mse=0.01"),
        ("a rank is missing", "int4_per_group_32; lossy"),
        ("a conversion is missing", "int4_per_group_32; lossy"),
        ("another start", "int4_per_group_32; lossy"),
        ("lossless", "int4_per_group_32; lossy"),
        ("nothing", "int4_per_group_32; lossy"),
    ],
)
def test_the_figure_is_the_whole_one_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, said: str
) -> None:
    """Of half the ranks it would be a wrong one; of no journal, none."""
    if case == "a rank is missing":
        write(tmp_path, journal(lossy_supervisor(), lossy_rank(0)))
    elif case == "a conversion is missing":
        write(
            tmp_path,
            journal(lossy_supervisor(), lossy_rank(0), lossy_rank(1, conversions=all_conversions()[1:])),
        )
    elif case != "nothing":
        write(tmp_path, lossless() if case == "lossless" else lossy())
    monkeypatch.setenv("KIMI_K3_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("KIMI_K3_START_ID", "s-other" if case == "another start" else START_ID)
    assert header_value() == said
