# SPDX-License-Identifier: Apache-2.0
"""The load generator measures what it says, on a server whose answers are known."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from benchmarks.load import Result, ask_at_rate, has_events, listen, percentile

from tests.watch.answering import Answer, answering


def port_of(url: str) -> int:
    """The port in a URL."""
    return int(url.rpartition(":")[2])


def test_percentiles() -> None:
    """The largest of few values is their p99."""
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 3, 4, 4]


def test_answers_and_errors_are_counted() -> None:
    """A 503 is an answer of a probe, a 500 an error; all that were sent are in one of both."""

    def answer(path: str, header: str | None) -> Answer:
        return {"/livez": 200, "/readyz": 503}.get(path, 500), b"x" * 10_000

    with answering(answer) as url:
        for path, good in (("/livez", True), ("/readyz", True), ("/status", False)):
            result = Result(path, rate=50.0)
            asyncio.run(ask_at_rate(port_of(url), result, 4, time.monotonic() + 0.3))
            assert len(result.late) >= 10
            assert (len(result.seconds), result.errors.total())[not good] == len(result.late)
            assert result.row(0.3).startswith(f"| `{path}` | 50 | ")


def test_nobody_answers() -> None:
    """A sidecar that died is a table of errors, not an exception."""
    with answering(lambda path, header: (200, b"")) as url:
        pass
    result = Result("/livez", rate=50.0)
    asyncio.run(ask_at_rate(port_of(url), result, 1, time.monotonic() + 0.2))
    assert (result.seconds, set(result.errors)) == ([], {"ConnectionRefusedError"})
    assert not has_events(port_of(url))
    events: Counter[str] = Counter()
    asyncio.run(listen(port_of(url), events, time.monotonic() + 0.2))
    assert events == {"ConnectionRefusedError": 1}


@pytest.mark.parametrize(("paths", "found"), [('{"/events": 1}', True), ("{}", False)])
def test_events_are_looked_for(paths: str, found: bool) -> None:
    """A sidecar without them is measured all the same."""
    with answering(lambda path, header: (200, f'{{"paths": {paths}}}'.encode())) as url:
        assert has_events(port_of(url)) is found


def test_a_stream_is_counted_by_kind() -> None:
    """Events are counted, and a stream that ends before its time is told."""
    events: Counter[str] = Counter()
    body = b"retry: 2000\n\nid: a-1\nevent: startup\ndata: {}\n\nevent: startup\ndata: {}\n\n"
    with answering(lambda path, header: (200, body)) as url:
        asyncio.run(asyncio.wait_for(listen(port_of(url), events, time.monotonic() + 5), 20))
    assert events["startup"] == 2
