# SPDX-License-Identifier: Apache-2.0
"""What a profile may say. Every flag, every variable and every number carries its reason.

A profile holds what belongs to a *kind of deployment*. What belongs to one start (checkpoint, host,
port, addresses of nodes, model name, secrets) and what follows from other values (timeouts, core lists)
is computed by the plan, so a profile may not set it: one fact, one home. What may not be said at all
stands in :mod:`kimi_k3.profiles.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from kimi_k3.profiles import rules
from kimi_k3.profiles.values import wrong_value
from kimi_k3.words.weights import ScaleRule, Weights

Why = Annotated[str, StringConstraints(strip_whitespace=True, min_length=10)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
FlagName = Annotated[str, StringConstraints(pattern=r"^--[a-z0-9][a-z0-9.-]*$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]
OpenName = Annotated[str, StringConstraints(pattern=r"^(--[a-z0-9][a-z0-9.-]*|[A-Z][A-Z0-9_]*)$")]
Count = Annotated[int, Field(ge=1, strict=True)]


class Device(StrEnum):
    """What the ranks run on."""

    CPU = "cpu"
    ROCM = "rocm"


class Architecture(StrEnum):
    """The GPU architectures that a profile can be for."""

    GFX942 = "gfx942"
    GFX950 = "gfx950"


class Verified(StrEnum):
    """How far a profile has been tried."""

    MEASURED = "measured"
    REPORTED = "reported"
    UNVERIFIED = "unverified"

    @property
    def meaning(self) -> str:
        """In an operator's words."""
        return _MEANINGS[self]


_MEANINGS = {
    Verified.MEASURED: "this project runs this profile, as it is, on such hardware",
    Verified.REPORTED: "others published results of this layout on such hardware; what was different is told",
    Verified.UNVERIFIED: "nobody is known to have served this; what comes nearest is told",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Flag(_Strict):
    """A vLLM flag; without a value it is a switch."""

    value: (
        Annotated[int, Field(strict=True)]
        | Annotated[float, Field(strict=True, allow_inf_nan=False)]
        | Annotated[str, Field(min_length=1)]
        | None
    ) = None
    why: Why


class Variable(_Strict):
    """An environment variable of vLLM's processes."""

    value: Annotated[str, Field(min_length=1)]
    why: Why


class Gpu(_Strict):
    """The GPUs that a profile is for.

    ``memory_gib`` is what each must have, at least: with less the weights do not fit.
    """

    architecture: Architecture
    per_node: Count
    memory_gib: Count
    why: Why


class Timeout(_Strict):
    """A number of seconds."""

    seconds: Annotated[int, Field(ge=0, strict=True)]
    why: Why


class Evidence(_Strict):
    """Who found out what, when and on what; ``differs`` is what was not as in the profile."""

    who: Text
    what: Text
    when: Annotated[str, StringConstraints(pattern=r"^20[0-9]{2}-[01][0-9](-[0-3][0-9])?$")]
    hardware: Text
    software: Text
    source: Text
    differs: Text | None = None


class Profile(_Strict):
    """One named deployment, complete: what it inherits is already in it."""

    schema_version: Literal[1]
    name: Name
    extends: Name | None = None
    title: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    summary: Why
    device: Device
    gpu: Gpu | None
    nodes: Count
    tensor_parallel_size: Count
    pipeline_parallel_size: Count
    data_parallel_size: Count
    data_parallel_size_local: Count
    decode_context_parallel_size: Count
    expert_parallel: bool
    sizes_why: Why
    weights: Weights
    scale_rule: ScaleRule | None
    verified: Verified
    evidence: tuple[Evidence, ...]
    start_timeout: Timeout
    drain_timeout: Timeout
    readiness_delay: Timeout
    flags: dict[FlagName, Flag]
    environment: dict[VariableName, Variable]
    left_open: dict[OpenName, Why]

    @property
    def start_timeout_seconds(self) -> int:
        """Seconds until the deployment must be ready."""
        return self.start_timeout.seconds

    @property
    def drain_timeout_seconds(self) -> int:
        """Seconds in which requests are finished before the end."""
        return self.drain_timeout.seconds

    @property
    def readiness_delay_seconds(self) -> int:
        """Seconds from "not ready" to the engine's SIGTERM."""
        return self.readiness_delay.seconds

    @property
    def ranks(self) -> int:
        """vLLM's worker processes on all nodes together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Those of one node."""
        return self.ranks // self.nodes

    @property
    def uses_plugin(self) -> bool:
        """Whether the engine plugin loads and reports; not on gfx950, where vLLM serves MXFP4 by itself."""
        return self.gpu is None or self.gpu.architecture is Architecture.GFX942

    @property
    def needs_draft(self) -> bool:
        """Whether a second checkpoint, which drafts tokens, belongs to a start."""
        return rules.SPECULATIVE in self.flags

    @property
    def not_startable(self) -> str | None:
        """Why ``kimi-k3 serve`` cannot start it yet; ``None`` if it can."""
        if self.needs_draft:
            return "needs a second checkpoint, a draft, which cannot be named yet"
        return None

    @field_validator("flags")
    @classmethod
    def _own_flags_only(cls, flags: dict[str, Flag]) -> dict[str, Flag]:
        for name in flags:
            if (reason := rules.refused_flag(name)) is not None:
                raise ValueError(reason)
        for name, flag in flags.items():
            if (reason := wrong_value(name, flag.value)) is not None:
                raise ValueError(reason)
        return flags

    @field_validator("environment")
    @classmethod
    def _own_variables_only(cls, environment: dict[str, Variable]) -> dict[str, Variable]:
        for name in environment:
            if (reason := rules.refused_variable(name)) is not None:
                raise ValueError(reason)
        return environment

    @field_validator("start_timeout")
    @classmethod
    def _time_to_start(cls, timeout: Timeout) -> Timeout:
        if timeout.seconds == 0:
            raise ValueError("seconds must be more than 0: nothing starts in no time")
        return timeout

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        # The first is enough: the operator corrects the file and comes back.
        for reason in self._wrongs():
            raise ValueError(reason)
        return self

    def _wrongs(self) -> Iterator[str]:
        if (self.device is Device.ROCM) is not (self.gpu is not None):
            yield f"gpu: must {'name the GPUs' if self.gpu is None else 'be null'} with device {self.device}"
        if self.weights.lossy and self.scale_rule is None:
            yield f"scale_rule: must be {' or '.join(ScaleRule)} with weights {self.weights}"
        if self.verified is not Verified.UNVERIFIED and not self.evidence:
            yield f"evidence: must not be empty with verified {self.verified}"
        yield from rules.wrong_sizes(
            devices=None if self.gpu is None else self.nodes * self.gpu.per_node,
            nodes=self.nodes,
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            data=self.data_parallel_size,
            data_local=self.data_parallel_size_local,
            decode_context=self.decode_context_parallel_size,
        )
        flags = {name: None if flag.value is None else str(flag.value) for name, flag in self.flags.items()}
        variables = {name: variable.value for name, variable in self.environment.items()}
        yield from rules.set_and_left_open(self.left_open, flags, variables)
        yield from rules.contradictions(flags, variables, expert_parallel=self.expert_parallel)
        if self.gpu is None:
            yield from rules.unfit_for_cpu(flags, variables)
            return
        yield from rules.unfit_for_gpus(flags, variables)
        if self.gpu.architecture is Architecture.GFX942:
            yield from rules.unfit_for_gfx942(flags, variables, self.weights)
        else:
            yield from rules.unfit_for_gfx950(self.weights)
