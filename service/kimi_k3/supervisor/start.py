# SPDX-License-Identifier: Apache-2.0
"""Everything that one start is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kimi_k3.journal.models import Notice, SupervisorRecord
from kimi_k3.supervisor.leader import Leader
from kimi_k3.supervisor.redact import Secrets


@dataclass(frozen=True, kw_only=True)
class Start:
    """Everything that one start is made of.

    ``environment`` is vLLM's whole environment; it holds ``api_key`` and is never written anywhere.
    ``checks`` raise an :class:`OperatorError` when this machine cannot run the start. One that has to wait
    calls what it is given: that sleeps some seconds and says whether to go on. They return what is odd.
    ``leader`` is the first node, on another one. ``engines`` share the requests (data parallelism).
    """

    record: SupervisorRecord
    argv: tuple[str, ...]
    state_dir: Path
    socket_dir: Path
    environment: dict[str, str] = field(repr=False)
    api_key: str | None = field(repr=False)
    start_timeout: float
    drain_timeout: float
    readiness_delay: float
    hang_timeout: float
    checks: Sequence[Callable[[Callable[[float], bool]], Sequence[Notice]]]
    engines: int = 1
    leader: Leader | None = field(default=None, repr=False)

    @property
    def secrets(self) -> Secrets:
        """What of the engine's environment may not be printed."""
        return Secrets.of(self.api_key, self.environment)
