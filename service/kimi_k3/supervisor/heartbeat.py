# SPDX-License-Identifier: Apache-2.0
"""Whether the engine still computes: its counters, and where they stand still, one small completion.

``/health`` tells neither: it answers 200 over a core that hangs, and comes late from one that is busy
(vllm-project/vllm#36451). The evidence, and what is wrong with each part of it alone:

* Counters of tokens and iterations advance only if the core computes, so an advance proves life. During the
  prefill of one long prompt nothing is counted, only the cache's use and the queues' lengths change: any
  change of these counts as an advance.
* ``vllm:num_requests_running`` is what the core last said. A core that hung before a request came says 0, and
  after an aborted request an idle one may go on saying 1.
* vLLM's ``/load`` (``--enable-server-load-tracking``) counts in the API server, and so sees a request that a
  hung core never took. It also counts a client that reads its answer slowly, or not at all.

So the last two only raise the suspicion; the engine is then asked for one token. If that is answered, it
computes; only if it is not, and no counter has moved meanwhile either, the engine is stalled. Silence of the
API server proves nothing. Counting in a middleware of ours would see no more than ``/load`` does, and
``/load`` at least begins to count when a request's body has arrived.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from kimi_k3.supervisor.engine_client import engine_client

INTERVAL_SECONDS = 2.0
STALL_SECONDS = 30.0
"""Requests that made no progress for so long raise the suspicion."""

TIMEOUT_SECONDS = 10.0
"""For an answer of the API server, and for the one token."""

_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{[^}\n]*\})? (\S+)$", re.MULTILINE)
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
PROGRESS = (
    "vllm:iteration_tokens_total_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:kv_cache_usage_perc",
    *RUNNING,
)
"""Only what the core tells: no client can move these."""


@dataclass(frozen=True)
class Beat:
    """What was read at one moment; ``None`` is what could not be read.

    Attributes:
        progress: the samples of :data:`PROGRESS`, summed over engines, by name.
        load: requests under way in the API server.
    """

    progress: dict[str, float] | None
    load: int | None

    @property
    def busy(self) -> bool:
        """Whether anybody says that a request is under way."""
        running = sum((self.progress or {}).get(name, 0.0) for name in RUNNING)
        return running > 0 or (self.load or 0) > 0

    @property
    def idle(self) -> bool:
        """Whether both core and API server say that none is."""
        return self.progress is not None and self.load is not None and not self.busy


def progress_of(metrics: str) -> dict[str, float] | None:
    """The samples of :data:`PROGRESS` in an exposition of Prometheus; ``None`` without any."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        if name in PROGRESS:
            try:
                sums[name] = sums.get(name, 0.0) + float(value)
            except ValueError:
                continue
    return sums or None


class Pulse:
    """Decides from one beat after the other; knows no clock and no network.

    Args:
        answers: asks for one token; ``True``: it came, ``False``: it did not come in time, ``None``: an error
            or no connection, which says nothing.
    """

    def __init__(self, answers: Callable[[], bool | None]) -> None:
        self._answers = answers
        self._progress: dict[str, float] | None = None
        self._moved_at: float | None = None
        self._asked_at: float | None = None
        self.stalled_since: float | None = None

    def take(self, beat: Beat, at: float) -> bool:
        """Take a beat that was read at ``at`` (seconds of any clock that goes on steadily).

        Returns:
            Whether the question for one token is due; if so, call :meth:`ask` and then take another beat.
        """
        if self._moved_at is None:
            self._moved(at)
        if beat.progress is None and beat.load is None:
            return False
        if beat.progress is not None and beat.progress != self._progress:
            self._progress = beat.progress
            self._moved(at)
        elif self.stalled_since is None and not beat.busy:
            self._moved(at)
        assert self._moved_at is not None
        since = max(self._moved_at, self._asked_at if self._asked_at is not None else self._moved_at)
        return at - since >= STALL_SECONDS

    def ask(self, at: float) -> None:
        """Ask for one token; without it, the engine is stalled since it last moved, until it moves again."""
        self._asked_at = at
        answer = self._answers()
        if answer:
            self._moved(at)
        elif answer is False and self.stalled_since is None:
            self.stalled_since = self._moved_at if self._moved_at is not None else at

    def _moved(self, at: float) -> None:
        self._moved_at, self.stalled_since, self._asked_at = at, None, None


@dataclass
class Heartbeat:
    """``stalled_since`` is a moment of :func:`time.monotonic`, ``None`` while the engine gets on.

    ``idle_at`` is when the question began that was last answered with: no request is under way. Nothing is
    asked before ``listening`` is set: an engine that starts has no requests.
    """

    stalled_since: float | None = None
    idle_at: float = float("-inf")
    listening: threading.Event = field(default_factory=threading.Event, repr=False)
    _stop: threading.Event = field(default_factory=threading.Event, repr=False)


@contextmanager
def watched_heartbeat(engine_url: str | None, model: str, api_key: str | None) -> Iterator[Heartbeat]:
    """A :class:`Heartbeat` that is kept up to date by a thread of its own until the block ends.

    An engine without an API cannot be asked: the first node's supervisor notices that nothing gets on.
    """
    heart = Heartbeat()
    if engine_url is None:
        yield heart
        return
    thread = threading.Thread(
        target=_listen, args=(engine_url, model, api_key, heart), name="engine-heartbeat", daemon=True
    )
    thread.start()
    try:
        yield heart
    finally:
        heart._stop.set()
        heart.listening.set()
        # A request under way ends by its own timeout; nobody has to wait for it.
        thread.join(0.5)


def _listen(engine_url: str, model: str, api_key: str | None, heart: Heartbeat) -> None:
    heart.listening.wait()
    if heart._stop.is_set():
        return
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    with engine_client(engine_url, timeout=TIMEOUT_SECONDS, headers=headers) as client:
        pulse = Pulse(lambda: one_token(client, model))
        while not heart._stop.wait(INTERVAL_SECONDS):
            asked = time.monotonic()
            beat = read_beat(client)
            if beat.idle:
                heart.idle_at = asked
            if pulse.take(beat, time.monotonic()):
                begun = time.monotonic()
                pulse.ask(begun)
                # It may have moved while it was asked.
                pulse.take(read_beat(client), time.monotonic())
            heart.stalled_since = pulse.stalled_since


def read_beat(client: httpx.Client) -> Beat:
    """Ask for metrics and load; what is not answered in time is unknown."""
    metrics, load = _get(client, "/metrics"), _get(client, "/load")
    return Beat(
        progress=None if metrics is None else progress_of(metrics.text),
        load=None if load is None else _load(load),
    )


def _get(client: httpx.Client, path: str) -> httpx.Response | None:
    try:
        answer = client.get(path)
    except httpx.HTTPError:
        return None
    return answer if answer.status_code == 200 else None


def _load(answer: httpx.Response) -> int | None:
    try:
        load = answer.json()["server_load"]
    except (ValueError, KeyError, TypeError):
        return None
    return load if isinstance(load, int) else None


def one_token(client: httpx.Client, model: str) -> bool | None:
    """Ask for one token: ``True``: it came, ``False``: it did not in time, ``None``: an error came."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 1,
        "temperature": 0,
    }
    try:
        answer = client.post("/v1/chat/completions", json=body)
    except httpx.ReadTimeout:
        return False
    except httpx.HTTPError:
        return None
    return True if answer.status_code == 200 else None
