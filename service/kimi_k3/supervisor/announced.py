# SPDX-License-Identifier: Apache-2.0
"""What the engine's output has told so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from kimi_k3.journal.models import RankSummary
from kimi_k3.supervisor.phases import latest, sign_of
from kimi_k3.words.phases import Phase


@dataclass
class Announced:
    """Fed line by line by the thread that reads the output, and read by the loop.

    Attributes:
        phase: the furthest phase that vLLM's log announced.
        summaries: what each rank says it serves.
    """

    phase: Phase = Phase.PENDING
    summaries: dict[int, RankSummary] = field(default_factory=dict)

    def take(self, line: str) -> None:
        """Read one line."""
        self.phase = latest(self.phase, sign_of(line))
        summary = RankSummary.in_line(line)
        if summary is not None:
            self.summaries[summary.rank] = summary
