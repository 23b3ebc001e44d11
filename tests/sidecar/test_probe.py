# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import pytest

from kimi_k3.sidecar.probe import EngineProbe
from kimi_k3.sidecar.view import EngineHealth, EngineOutcome

from .engine import FakeEngine, Mood


def make_probe(timeout: float = 20.0) -> EngineProbe:
    """A probe; it is patient unless the test is about its limit."""
    return EngineProbe(timeout_seconds=timeout, tls_verify=True, clock=lambda: datetime.now(tz=UTC))


@pytest.mark.parametrize(
    ("mood", "outcome", "status"),
    [
        ("ok", EngineOutcome.HEALTHY, 200),
        ("dead", EngineOutcome.UNHEALTHY, 503),
        ("redirect", EngineOutcome.UNHEALTHY, 307),
        ("garbage", EngineOutcome.FAILED, None),
    ],
)
def test_outcomes(engine: FakeEngine, mood: Mood, outcome: EngineOutcome, status: int | None) -> None:
    """Only 200 is healthy; a redirect is not followed to somewhere that is."""
    engine.mood = mood
    health = asyncio.run(make_probe().check(engine.url))
    assert (health.outcome, health.status_code) == (outcome, status)


@pytest.mark.parametrize("mood", ["hang", "drip"])
def test_time_limit(engine: FakeEngine, mood: Mood) -> None:
    """The limit holds for the whole exchange: bytes that drip do not extend it."""
    engine.mood = mood
    begun = time.perf_counter()
    assert asyncio.run(make_probe(0.3).check(engine.url)).outcome is EngineOutcome.TIMEOUT
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(
    ("url", "outcome"),
    [
        ("http://127.0.0.1:1", EngineOutcome.UNREACHABLE),
        ("", EngineOutcome.FAILED),
        ("nonsense", EngineOutcome.FAILED),
        ("ftp://127.0.0.1", EngineOutcome.FAILED),
        ("http://127.0.0.1:99999999", EngineOutcome.FAILED),
        ("http://[", EngineOutcome.UNREACHABLE),
        ("http://\x00", EngineOutcome.FAILED),
        ("http://" + "a" * 70000, EngineOutcome.FAILED),
    ],
)
def test_urls(url: str, outcome: EngineOutcome) -> None:
    """Whatever stands in the record, asking gives an answer and no exception."""
    assert asyncio.run(make_probe().check(url)).outcome is outcome


def test_proxy_of_the_environment_is_not_used(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's proxy cannot reach the pod's own loopback."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert asyncio.run(make_probe().check(engine.url)).healthy


def test_callers_share_one_question(engine: FakeEngine) -> None:
    """Probes that come while the engine hangs must not pile up on it."""
    engine.mood = "hang"

    async def many() -> list[EngineHealth]:
        probe = make_probe(1)
        return await asyncio.gather(*(probe.check(engine.url) for _ in range(20)))

    assert {health.outcome for health in asyncio.run(many())} == {EngineOutcome.TIMEOUT}
    assert engine.asked == 1


def test_a_caller_that_leaves_does_not_spoil_it_for_others(engine: FakeEngine) -> None:
    """A client that hangs up cancels its own wait only."""
    engine.mood = "hang"

    async def two() -> EngineHealth:
        probe = make_probe(1)
        leaving = asyncio.create_task(probe.check(engine.url))
        staying = asyncio.create_task(probe.check(engine.url))
        await asyncio.sleep(0.05)
        leaving.cancel()
        return await staying

    assert asyncio.run(two()).outcome is EngineOutcome.TIMEOUT


def test_since_is_when_it_changed(engine: FakeEngine) -> None:
    """How long the engine has been unhealthy counts, however it fails from one time to the next."""

    async def story() -> list[EngineHealth]:
        probe = make_probe()
        answers = []
        for mood in ("ok", "ok", "dead", "garbage", "ok"):
            engine.mood = mood
            answers.append(await probe.check(engine.url))
        return answers

    first, second, dead, garbage, again = asyncio.run(story())
    assert first.since == second.since == first.checked_at
    assert dead.since == garbage.since == dead.checked_at
    assert again.since == again.checked_at


def test_close_gives_up(engine: FakeEngine) -> None:
    """A stop does not wait for an engine that hangs."""
    engine.mood = "hang"

    async def closing() -> None:
        probe = make_probe(25)
        waiting = asyncio.create_task(probe.check(engine.url))
        await asyncio.sleep(0.05)
        await probe.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    begun = time.perf_counter()
    asyncio.run(closing())
    assert time.perf_counter() - begun < 5
