# SPDX-License-Identifier: Apache-2.0
"""What is checked: a start, as far as it is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimi_k3.checkpoint import Checkpoint
from kimi_k3.plan.launch import Deployment, Launch, profile_flags
from kimi_k3.plan.report import Plan
from kimi_k3.profiles.schema import Device, Profile


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A start.

    Attributes:
        deployment: every value decided.
        launch: argv and environment of vLLM.
        checkpoint: what is on disk; ``None`` if none was named or it cannot be read.
        plan: its figures; ``None`` without a checkpoint.
        wait_vram: seconds to wait for GPU memory that somebody is about to free.
    """

    deployment: Deployment
    launch: Launch
    checkpoint: Checkpoint | None = None
    plan: Plan | None = None
    wait_vram: float = 0.0

    @property
    def profile(self) -> Profile:
        """The profile."""
        return self.deployment.profile

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks run on GPUs."""
        return self.profile.device is Device.ROCM

    @property
    def flags(self) -> dict[str, str | None]:
        """The profile's flags with the operator's values."""
        return profile_flags(self.deployment)

    @property
    def ranks_here(self) -> int:
        """Ranks on this node."""
        return self.profile.ranks_per_node

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment that vLLM will have."""
        return {**inherited, **self.launch.environment}
