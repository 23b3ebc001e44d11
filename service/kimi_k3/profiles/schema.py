# SPDX-License-Identifier: Apache-2.0
"""What a profile may say. Every flag and every variable carries its reason.

A profile holds what belongs to a *kind of deployment*. What belongs to one start (checkpoint, host,
port, model name, secrets) and what follows from other values (timeouts, core lists) is computed by
the plan, so a profile may not set it: one fact, one home.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from kimi_k3.words.weights import ScaleRule, Weights

PLANNED_FLAGS = frozenset(
    {
        "--model",
        "--host",
        "--port",
        "--served-model-name",
        "--load-format",
        "--quantization-config",
        "--quantization-config.moe.weight",
        "--tensor-parallel-size",
        "--enable-expert-parallel",
        "--shutdown-timeout",
        "--disable-access-log-for-endpoints",
    }
)
"""vLLM flags that only the plan writes."""

REFUSED_FLAGS = {
    "--api-key": "a key in argv is readable by every user of the machine",
    "--trust-remote-code": "it would run code that comes with the checkpoint",
}
"""vLLM flags that no deployment of this product may use, and why."""

PLANNED_VARIABLES = frozenset(
    {
        "VLLM_API_KEY",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_PLUGINS",
    }
)
"""Environment variables that only the plan or the supervisor writes, beside ``KIMI_K3_*``."""

Why = Annotated[str, StringConstraints(strip_whitespace=True, min_length=10)]


class Device(StrEnum):
    """What the ranks run on."""

    CPU = "cpu"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Flag(_Strict):
    """A vLLM flag; without a value it is a switch."""

    value: Annotated[int, Field(strict=True)] | Annotated[str, Field(min_length=1)] | None = None
    why: Why


class Variable(_Strict):
    """An environment variable of vLLM's processes."""

    value: Annotated[str, Field(min_length=1)]
    why: Why


class Profile(_Strict):
    """One named deployment."""

    schema_version: Literal[1]
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    title: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    device: Device
    weights: Weights
    scale_rule: ScaleRule
    tensor_parallel_size: Annotated[int, Field(ge=1)]
    expert_parallel: bool
    start_timeout_seconds: Annotated[int, Field(gt=0)]
    drain_timeout_seconds: Annotated[int, Field(ge=0)]
    flags: dict[Annotated[str, StringConstraints(pattern=r"^--[a-z0-9][a-z0-9.-]*$")], Flag]
    environment: dict[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")], Variable]

    @field_validator("flags")
    @classmethod
    def _own_flags_only(cls, flags: dict[str, Flag]) -> dict[str, Flag]:
        for name in flags:
            if name in REFUSED_FLAGS:
                raise ValueError(f"{name} is refused: {REFUSED_FLAGS[name]}")
            if name in PLANNED_FLAGS:
                raise ValueError(f"{name} is written by the plan, not by a profile")
        return flags

    @field_validator("environment")
    @classmethod
    def _own_variables_only(cls, environment: dict[str, Variable]) -> dict[str, Variable]:
        for name in environment:
            if name in PLANNED_VARIABLES or name.startswith("KIMI_K3_"):
                raise ValueError(f"{name} is written by the plan, not by a profile")
        return environment
