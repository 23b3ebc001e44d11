# SPDX-License-Identifier: Apache-2.0
"""The phases of a deployment, in the order in which a start passes through them."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """One phase; the value is what every interface prints."""

    PENDING = "pending"
    PREFLIGHT = "preflight"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    CONVERTING = "converting"
    COMPILING = "compiling"
    CAPTURING = "capturing"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def position(self) -> int:
        """Index in the order of a start; a start never goes back to a lower one."""
        return list(Phase).index(self)

    @property
    def description(self) -> str:
        """What happens in this phase, in one short line."""
        return _DESCRIPTIONS[self]


STARTING = tuple(phase for phase in Phase if phase.position < Phase.READY.position)
"""Phases in which the engine does not serve yet."""

ENDED = (Phase.STOPPED, Phase.FAILED)
"""Phases that nothing follows."""

_DESCRIPTIONS = {
    Phase.PENDING: "nothing has started",
    Phase.PREFLIGHT: "checking the checkpoint, the machine and the plan",
    Phase.DOWNLOADING: "fetching the checkpoint",
    Phase.LOADING: "starting vLLM's processes and reading the checkpoint's shards",
    Phase.CONVERTING: "putting the experts' weights into place, layer by layer (int4: converting them)",
    Phase.COMPILING: "profiling memory and compiling",
    Phase.CAPTURING: "capturing graphs",
    Phase.WARMING: "waiting for the engine's health and the first completion",
    Phase.READY: "serving",
    Phase.DRAINING: "finishing requests before the end",
    Phase.STOPPED: "ended on request",
    Phase.FAILED: "ended by an error",
}
