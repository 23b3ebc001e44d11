# SPDX-License-Identifier: Apache-2.0
"""A hang is told from a busy engine by what it computes, not by how fast it answers."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.supervisor import heartbeat
from kimi_k3.supervisor.heartbeat import (
    STALL_SECONDS,
    Beat,
    Pulse,
    one_token,
    progress_of,
    read_beat,
    watched_heartbeat,
)
from tests.wheels import VERSIONS, vllm_source

EXPOSITION = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="kimi-k3"} 1.0
vllm:num_requests_running{engine="1",model_name="kimi-k3"} 2.0
vllm:num_requests_waiting{engine="0",model_name="kimi-k3"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="kimi-k3"} 0.25
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="kimi-k3"} 7.0
vllm:iteration_tokens_total_count{engine="0",model_name="kimi-k3"} 40.0
vllm:generation_tokens_total{engine="0",model_name="kimi-k3"} 400.0
vllm:generation_tokens_created{engine="0",model_name="kimi-k3"} 1.7e+09
http_requests_total{handler="/metrics",method="GET",status="2xx"} 9.0
"""


def beat(tokens: float = 0, *, running: float = 0, load: int | None = 0) -> Beat:
    return Beat({"vllm:generation_tokens_total": tokens, "vllm:num_requests_running": running}, load)


class Engine:
    """Answers the question for one token as told, and counts it."""

    def __init__(self, answer: bool | None) -> None:
        self.answer = answer
        self.asked = 0

    def __call__(self) -> bool | None:
        self.asked += 1
        return self.answer


def follow(pulse: Pulse, beats: list[Beat], *, begin: float = 0.0, step: float = 2.0) -> None:
    """One beat every ``step`` seconds, and the question whenever it is due."""
    for number, one in enumerate(beats):
        at = begin + number * step
        if pulse.take(one, at):
            pulse.ask(at)


def test_what_is_read_of_the_metrics() -> None:
    """Only what the core tells counts, over all engines; our own scraping must not look like progress."""
    found = progress_of(EXPOSITION)
    assert found == {
        "vllm:num_requests_running": 3.0,
        "vllm:num_requests_waiting": 0.0,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:iteration_tokens_total_count": 40.0,
        "vllm:generation_tokens_total": 400.0,
    }
    assert progress_of("{}") is None


@pytest.mark.parametrize("version", VERSIONS)
def test_the_names_stand_in_vllms_source(version: str) -> None:
    """A metric that was renamed would make every engine look idle, and no hang would ever be seen."""
    source = vllm_source(version)
    metrics = (source / "v1/metrics/loggers.py").read_text()
    for name in heartbeat.PROGRESS:
        assert (
            f'"{name.removesuffix("_total").removesuffix("_count")}"' in metrics
            or f'"{name}"' in metrics
            or (f'"{name.removesuffix("_count")}"' in metrics)
        ), name
    served = "".join(path.read_text() for path in (source / "entrypoints").rglob("*.py"))
    assert '"server_load"' in served
    assert "enable_server_load_tracking" in served


@pytest.mark.parametrize("seen", [beat(5, running=2), beat(5, load=1), beat(5, running=1, load=3)])
def test_a_hung_engine_is_stalled(seen: Beat) -> None:
    """Also if the core hung before the request came: then only the API server knows of it."""
    pulse = Pulse(Engine(False))
    follow(pulse, [seen] * 20)
    assert pulse.stalled_since == 0.0
    # Clients that give up do not make it well; that it computes again does.
    follow(pulse, [Beat(seen.progress, 0)] * 20, begin=40)
    assert pulse.stalled_since == 0.0
    pulse.take(beat(6), 90)
    assert pulse.stalled_since is None


def test_a_busy_engine_is_never_stalled() -> None:
    """It computes; that nobody has time to answer for a token, for /health or for /metrics proves nothing."""
    engine = Engine(False)
    pulse = Pulse(engine)
    follow(pulse, [beat(number, running=8, load=50) for number in range(1000)])
    follow(pulse, [Beat(None, None)] * 1000, begin=2000)
    assert pulse.stalled_since is None
    assert engine.asked == 0


@pytest.mark.parametrize("seen", [beat(5, load=1), beat(5, running=1), beat(5, load=-1)])
def test_what_only_looks_busy_is_asked(seen: Beat) -> None:
    """A client that does not read its answer, and a gauge left by an aborted request, must end nobody."""
    pulse = Pulse(Engine(True))
    follow(pulse, [seen] * 200)
    assert pulse.stalled_since is None


def test_an_idle_engine_is_left_alone() -> None:
    """Nothing to do is no stall, and no reason to make the GPUs work."""
    engine = Engine(False)
    follow(Pulse(engine), [beat(5)] * 200)
    assert engine.asked == 0


def test_an_error_is_no_hang() -> None:
    """An engine that answers, even with an error, is another's matter."""
    engine = Engine(None)
    pulse = Pulse(engine)
    follow(pulse, [beat(5, load=1)] * 100)
    assert pulse.stalled_since is None
    assert 1 < engine.asked <= 200 / STALL_SECONDS


def test_a_long_prompt_is_progress() -> None:
    """While it is read nothing is counted for minutes, but the cache fills."""
    pulse = Pulse(Engine(False))
    follow(
        pulse,
        [
            Beat({"vllm:kv_cache_usage_perc": use / 1000, "vllm:num_requests_running": 1}, 1)
            for use in range(200)
        ],
    )
    assert pulse.stalled_since is None


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    loads=st.lists(st.none() | st.integers(0, 2), min_size=60, max_size=60),
    answer=st.sampled_from([True, False, None]),
)
def test_nothing_that_moved_lately_is_stalled(
    tokens: list[int], loads: list[int | None], answer: bool | None
) -> None:
    """Whatever comes: a stall is as old as the suspicion, and needs an unanswered question."""
    pulse = Pulse(Engine(answer))
    moved, total = 0.0, 0
    for number, (more, load) in enumerate(zip(tokens, loads, strict=False)):
        at, total = number * 7.0, total + more
        moved = at if more or not number else moved
        if pulse.take(beat(total, load=load), at):
            pulse.ask(at)
        if pulse.stalled_since is not None:
            assert answer is False
            assert moved <= pulse.stalled_since <= at - STALL_SECONDS


def client(handle: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(handle), base_url="http://engine")


def test_a_beat_is_what_the_server_says() -> None:
    """What is not answered, or not as expected, is unknown."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=EXPOSITION)
        return httpx.Response(200, json={"server_load": 4})

    assert read_beat(client(handle)).load == 4
    assert read_beat(client(handle)).busy
    for answer in (httpx.Response(404), httpx.Response(200, text="x"), httpx.Response(200, json=[])):
        assert read_beat(client(lambda _, answer=answer: answer)) == Beat(None, None)  # type: ignore[misc]

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    assert read_beat(client(refuse)) == Beat(None, None)


def test_one_token() -> None:
    """Only a request that was taken and not answered is a sign of a hang."""

    def late(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late", request=request)

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    assert one_token(client(lambda _: httpx.Response(200)), "k3") is True
    assert one_token(client(lambda _: httpx.Response(500)), "k3") is None
    assert one_token(client(late), "k3") is False
    assert one_token(client(refuse), "k3") is None


def test_nothing_is_asked_of_an_engine_that_starts() -> None:
    """And the thread ends with the block, whether it ever listened or not."""
    begun = time.monotonic()
    with watched_heartbeat("http://127.0.0.1:1", "k3", None) as heart:
        assert heart.stalled_since is None
    assert time.monotonic() - begun < 5
