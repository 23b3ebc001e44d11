# SPDX-License-Identifier: Apache-2.0
"""A machine so slow that a toy loads as long as a model does: its ranks are stopped most of the time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from kimi_k3.journal.reader import read_journal
from kimi_k3.words.phases import Phase

STOPPED_SECONDS, RUNNING_SECONDS = 0.5, 0.01


@contextlib.contextmanager
def slow_loading(state: Path) -> Iterator[None]:
    """Ranks whose records stand in this directory run 2 % of the time while they load."""
    over = threading.Event()
    thread = threading.Thread(target=_slow_down, args=(state, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _slow_down(state: Path, over: threading.Event) -> None:
    while not over.wait(RUNNING_SECONDS):
        loading = [
            rank.pid
            for rank in read_journal(state).ranks
            if rank.loading is not None and rank.phases[-1].phase is Phase.LOADING
        ]
        if not loading:
            continue
        _signal(loading, signal.SIGSTOP)
        over.wait(STOPPED_SECONDS)
        _signal(loading, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
