# SPDX-License-Identifier: Apache-2.0
"""What one rank tells the journal: its way through loading and conversion, and its memory ever after."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3.engine.memory import read_memory
from kimi_k3.engine.voice import say
from kimi_k3.journal.models import (
    KernelProof,
    Loading,
    PhaseChange,
    ProjectionConversion,
    RankRecord,
    rank_file,
)
from kimi_k3.journal.writer import PatientWriter, now
from kimi_k3.words.environment import EngineEnvironment
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import Requantisation, Weights

if TYPE_CHECKING:
    from kimi_k3.engine.choice import Proved

LOADING_REPORT_SECONDS = 0.5
"""Progress of loading changes with every tensor; the file changes at most this often."""


BEAT_SECONDS = 10.0
"""How often the record is written when nothing changes but the memory. A record that could not be written
is written then, too."""


class RankReporter:
    """Keeps one rank's record and writes it on every change; without a journal it only keeps it."""

    def __init__(
        self,
        directory: Path | None,
        start_id: str,
        rank: int,
        weights: Weights,
        requantisation: Requantisation | None,
    ) -> None:
        self._writer = (
            PatientWriter(directory, rank_file(rank), report=say) if directory is not None else None
        )
        self._next_loading_report = 0.0
        self.record = RankRecord(
            start_id=start_id,
            rank=rank,
            pid=os.getpid(),
            updated_at=now(),
            weights=weights,
            requantisation=requantisation,
        )

        self._lock = threading.Lock()
        if self._writer is not None:
            threading.Thread(target=self._beat, name="kimi-k3 rank reporter", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._update(memory=read_memory())

    def serves_through(self, backend: str, proved: Proved | None = None) -> None:
        """This rank's experts are computed by a back end, and what was proved of it."""
        if proved is None:
            changes: dict[str, object] = {"backend": backend}
        else:
            proof = KernelProof(
                relative_error=proved.proof.error,
                relative_error_with_signs=_number(proved.proof.signed_error),
                signs_right=None if proved.proof.signed_error is None else proved.proof.right_with_signs,
            )
            changes = {"backend": backend, "proof": proof, "requantisation": proved.requantisation}
        if any(getattr(self.record, name) != value for name, value in changes.items()):
            self._update(**changes)

    def enter(self, phase: Phase) -> None:
        """This rank begins a phase."""
        change = PhaseChange(phase=phase, at=now())
        self._update(phases=(*self.record.phases, change), memory=read_memory())

    def loaded(self) -> None:
        """This rank's weights are in place; it goes on to profiling and compiling."""
        self.enter(Phase.COMPILING)
        if self._writer is not None:
            print(self.record.summary().line(), file=sys.stderr, flush=True)

    def loading(self, progress: Loading, *, last: bool = False) -> None:
        """This rank has read so much of the checkpoint."""
        if not last and time.monotonic() < self._next_loading_report:
            return
        self._next_loading_report = time.monotonic() + LOADING_REPORT_SECONDS
        self._update(loading=progress, memory=read_memory())

    def converted(self, conversion: ProjectionConversion) -> None:
        """This rank has converted a projection."""
        self._update(
            conversions=(*self.record.conversions, conversion),
            memory=conversion.memory_after or read_memory(),
        )

    def _update(self, **changes: object) -> None:
        with self._lock:
            self.record = self.record.model_copy(update={**changes, "updated_at": now()})
            if self._writer is not None:
                self._writer.write(self.record)


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@cache
def rank_reporter() -> RankReporter:
    """The reporter of this process's rank.

    Call it only in a worker, after vLLM has set up its process groups.
    """
    from vllm.distributed import get_world_group

    from kimi_k3.engine.request import requested_weights

    environment = EngineEnvironment.read()
    weights = requested_weights()
    return RankReporter(
        environment.state_dir if environment.start_id else None,
        environment.start_id or "none",
        get_world_group().rank,
        weights,
        environment.requantisation if weights.lossy else None,
    )
