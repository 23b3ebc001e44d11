# SPDX-License-Identifier: Apache-2.0
"""`kimi-k3 watch`: look once, or again and again; the exit code tells the readiness that was seen last."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live

from kimi_k3.watch.changes import changes
from kimi_k3.watch.client import Sidecar
from kimi_k3.watch.draw import draw, told_reasons
from kimi_k3.watch.picture import Picture, State, document, look

POLL_SECONDS = 1.0
DRAW_SECONDS = 0.5
"""A silence is counted on while an answer is waited for."""

END_SECONDS = 0.5
"""How long a look under way may take at the end."""


@dataclass(frozen=True)
class Request:
    """What to watch, and how.

    Attributes:
        authorities: whose certificates are trusted, a PEM file; ``None`` for the system's.
        wait: end when the deployment is ready or has ended, or after ``timeout_seconds``.
        once: look once.
        as_json: print one JSON document at the end and nothing else.
    """

    url: str
    token: str | None
    once: bool
    as_json: bool
    wait: bool
    timeout_seconds: float | None
    authorities: Path | None = None


def run_watch(request: Request) -> int:
    """Watch until told to end; returns the exit code of :class:`kimi_k3.watch.picture.State`.

    Raises:
        OperatorError: the sidecar wants a token.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    with _watcher(request) as watcher:
        if request.wait:
            picture = _follow(watcher, console, request)
        elif request.once or request.as_json:
            picture = watcher.latest()
        else:
            picture = _follow(watcher, console, request)
    if request.as_json:
        print(json.dumps(document(picture, datetime.now(tz=UTC)), indent=1))
    elif request.once:
        console.print(draw(picture, time.monotonic()))
    return picture.state.exit_code


class Watcher:
    """Looks again and again in a thread of its own, so that a silence can be counted while it lasts."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self._news = threading.Condition()
        self._picture = Picture(url=sidecar.url, since=time.monotonic())
        self._looks = 0
        self._failure: Exception | None = None
        self._stop = threading.Event()

    def run(self) -> None:
        """Look once a second until :meth:`stop`."""
        try:
            self._run()
        finally:
            self._sidecar.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            failure: Exception | None = None
            picture = self._picture
            try:
                picture = look(self._sidecar, picture, time.monotonic)
            except Exception as error:
                # Raised again where it is seen: a thread that died would leave an old picture standing.
                failure = error
            with self._news:
                self._picture, self._failure = picture, failure
                self._looks += 1
                self._news.notify_all()
            if failure is not None:
                return
            self._stop.wait(max(0.0, POLL_SECONDS - (time.monotonic() - began)))

    def stop(self) -> None:
        """Look no more after the present look."""
        self._stop.set()

    def latest(self, *, after: int = 0, seconds: float | None = None) -> Picture:
        """The last picture, once there have been more than ``after`` looks, or after ``seconds``.

        Raises:
            OperatorError: the sidecar wants a token.
        """
        with self._news:
            self._news.wait_for(lambda: self._looks > after, seconds)
            if self._failure is not None:
                raise self._failure
            return self._picture.seen_at(time.monotonic())

    @property
    def looks(self) -> int:
        """How many looks there have been."""
        return self._looks


@contextmanager
def _watcher(request: Request) -> Iterator[Watcher]:
    sidecar = Sidecar(request.url, request.token, request.authorities)
    watcher = Watcher(sidecar)
    # A daemon: Ctrl-C must not wait for an answer that does not come.
    thread = threading.Thread(target=watcher.run, name="kimi-k3 watch", daemon=True)
    thread.start()
    try:
        yield watcher
    finally:
        watcher.stop()
        thread.join(END_SECONDS)


def _follow(watcher: Watcher, console: Console, request: Request) -> Picture:
    """Show what changes until there is nothing left to wait for; without ``wait`` that is never."""
    end = None if request.timeout_seconds is None else time.monotonic() + request.timeout_seconds
    if request.as_json or request.once:
        return _until_over(watcher, request, end, lambda _: None)
    if not console.is_terminal or console.is_dumb_terminal:
        told: list[Picture] = []

        def tell(picture: Picture) -> None:
            for line in changes(told[-1] if told else None, picture, time.monotonic()):
                print(f"{datetime.now(tz=UTC):%H:%M:%S}Z {line}", flush=True)
            told[:] = [picture]

        return _until_over(watcher, request, end, tell)
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        return _until_over(
            watcher,
            request,
            end,
            lambda picture: live.update(draw(picture, time.monotonic()), refresh=True),
        )


def _until_over(
    watcher: Watcher, request: Request, end: float | None, show: Callable[[Picture], None]
) -> Picture:
    looks = 0
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        picture = watcher.latest(
            after=looks, seconds=DRAW_SECONDS if left is None else min(DRAW_SECONDS, left)
        )
        looks = watcher.looks
        if looks:
            show(picture)
        if request.wait and looks and picture.state in (State.READY, State.ENDED):
            return picture
        if end is not None and time.monotonic() >= end:
            print(
                f"kimi-k3: after {request.timeout_seconds:g} s it is {picture.state}: {_why(picture)}",
                file=sys.stderr,
            )
            return picture


def _why(picture: Picture) -> str:
    if picture.error is not None or picture.readiness is None:
        return picture.error or "nobody has answered yet"
    return " ".join(reason.message for reason in told_reasons(picture))
