# SPDX-License-Identifier: Apache-2.0
"""A start of a toy whose loading lasts as long as it needs to be seen: its ranks are stopped on the way.

``python -m tests.observability.slowly STATE_DIR`` does so until its input is closed. It is a process of its
own because a toy reads its checkpoint within 50 ms, which a thread of a busy test would miss.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kimi_k3.engine.reporter import LOADING_REPORT_SECONDS
from kimi_k3.journal.models import RankRecord
from kimi_k3.journal.reader import read_journal
from kimi_k3.sidecar.startup import LEAST_FRACTION, LEAST_SECONDS
from kimi_k3.words.phases import Phase
from tests.observability.expressions import ROOT
from tests.surroundings import SURROUNDINGS

LOOK_SECONDS = 0.002
BEFORE_READING_SECONDS = 0.02
"""Stopped at a time while the model is built, so that the first tensor is not long read when it is seen."""

SEEN_SECONDS = LEAST_SECONDS + 4
"""Stopped once enough has been read that the rest can be told: Prometheus looks every second."""


@contextlib.contextmanager
def slow_loading(state: Path) -> Iterator[None]:
    """Slow down the ranks whose records stand in this directory."""
    command = [sys.executable, "-m", "tests.observability.slowly", str(state)]
    process = subprocess.Popen(command, cwd=ROOT, env=SURROUNDINGS, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.communicate()


def _pause(rank: RankRecord) -> float | None:
    """Seconds for which to stop a rank that has told this; ``None`` if it is not loading."""
    if rank.phases[-1].phase is not Phase.LOADING:
        return None
    if rank.loading is None or rank.loading.bytes_total is None:
        return BEFORE_READING_SECONDS
    if rank.loading.bytes_done < LEAST_FRACTION * rank.loading.bytes_total:
        # Its next tensor is then reported at once.
        return LOADING_REPORT_SECONDS * 1.1
    return SEEN_SECONDS


def _over(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _send(ranks: Sequence[RankRecord], number: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def main() -> None:
    """Stop and let go."""
    longest = 0.0
    while longest < SEEN_SECONDS and not _over(LOOK_SECONDS):
        loading = {rank: pause for rank in read_journal(Path(sys.argv[1])).ranks if (pause := _pause(rank))}
        if loading:
            longest = max(loading.values())
            _send(tuple(loading), signal.SIGSTOP)
            _over(longest)
            _send(tuple(loading), signal.SIGCONT)


if __name__ == "__main__":
    main()
