# SPDX-License-Identifier: Apache-2.0
"""What the engine's output has told so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from kimi_k3.journal.models import RankSummary, Step
from kimi_k3.journal.writer import now
from kimi_k3.supervisor.phases import bar_of, cache_of, latest, shuts_down, sign_of
from kimi_k3.words.phases import Phase


@dataclass
class Announced:
    """Fed line by line by the thread that reads the output, and read by the loop.

    Attributes:
        phase: the furthest phase that vLLM's log announced.
        step: the last thing within a phase that it announced.
        summaries: what each rank says it serves.
        kv_cache_bytes: of the rank that has the smallest cache.
        shuts_down: whether it ends its processes.
    """

    phase: Phase = Phase.PENDING
    step: Step | None = None
    summaries: dict[int, RankSummary] = field(default_factory=dict)
    kv_cache_bytes: int | None = None
    shuts_down: bool = False

    def take(self, line: str) -> None:
        """Read one line."""
        self.shuts_down = self.shuts_down or shuts_down(line)
        sign = sign_of(line)
        if sign is not None:
            self.phase = latest(self.phase, sign.phase)
        if (bar := bar_of(line)) is not None:
            graphs, done, total = bar
            self._begin(Phase.CAPTURING, f"capturing graphs ({graphs})", done, total)
        elif sign is not None and sign.step is not None:
            self._begin(sign.phase, sign.step)
        if (size := cache_of(line)) is not None:
            self.kv_cache_bytes = min(size, self.kv_cache_bytes or size)
        summary = RankSummary.in_line(line)
        if summary is not None:
            self.summaries[summary.rank] = summary

    def _begin(self, phase: Phase, name: str, done: int | None = None, total: int | None = None) -> None:
        """A step of a phase that is over is nothing new; the same step keeps the moment at which it began."""
        if phase is not self.phase:
            return
        before = self.step
        same = before is not None and (before.phase, before.name) == (phase, name)
        since = before.since if same and before is not None else now()
        self.step = Step(phase=phase, name=name, since=since, done=done, total=total)
