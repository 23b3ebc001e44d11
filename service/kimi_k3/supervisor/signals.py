# SPDX-License-Identifier: Apache-2.0
"""Requests to end as data for the loop, instead of exceptions at any place in it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

SAME_SECONDS = 0.5
"""Signals closer together are one wish: timeout(1) signals its child and then the whole group."""


@contextmanager
def received_signals() -> Iterator[list[signal.Signals]]:
    """The signals received so far, in order; a list that grows. Only in the main thread.

    A signal that is ignored (``nohup``, a background job's SIGINT) stays so.
    """
    received: list[signal.Signals] = []
    times: list[float] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        # No more than this: a handler that takes a lock can meet itself.
        moment = time.monotonic()
        if not times or moment - times[-1] >= SAME_SECONDS:
            received.append(signal.Signals(number))
        times.append(moment)

    before = {
        number: signal.signal(number, handle)
        for number in HANDLED
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
