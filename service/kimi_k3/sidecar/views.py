# SPDX-License-Identifier: Apache-2.0
"""Each resource of the API, from the present state."""

from __future__ import annotations

from kimi_k3.sidecar.conversion import Conversion, conversion_view
from kimi_k3.sidecar.memory import Memory, memory_view
from kimi_k3.sidecar.readiness import Readiness, readiness_view
from kimi_k3.sidecar.startup import Startup, startup_view
from kimi_k3.sidecar.state import State
from kimi_k3.sidecar.status import Status, status_view
from kimi_k3.sidecar.warning import Warnings, warnings_view


def startup(state: State) -> Startup:
    """How far the start is."""
    return startup_view(state.journal, state.now)


def readiness(state: State) -> Readiness:
    """Whether traffic may come."""
    return readiness_view(state.journal, state.health, state.now)


def status(state: State) -> Status:
    """Everything at a glance."""
    return status_view(state.journal, state.health, state.now)


def conversion(state: State) -> Conversion:
    """What the conversion did; of the journal alone."""
    return conversion_view(state.journal)


def memory(state: State) -> Memory:
    """Where the memory is, and was at each conversion. Reads the kernel's files."""
    return memory_view(state.journal, state.machine())


def memory_now(state: State) -> Memory:
    """Where the memory is, without the conversions. Reads the kernel's files."""
    return memory_view(state.journal, state.machine(), conversions=False)


def warnings(state: State) -> Warnings:
    """What to know or to mend."""
    return warnings_view(state.journal, state.health, state.now, state.acknowledgements)
