# SPDX-License-Identifier: Apache-2.0
"""The documents of ``kimi-k3 kernels build --json`` and ``kernels check --json``."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from kimi_k3.errors import ExitCode
from kimi_k3.kernels.transcript import Failure, Sizes

SCHEMA_VERSION: Final = 1


class Presence(StrEnum):
    """Whether a compiled kernel is there. ``unknown`` is what could not be found out: never ``present``."""

    PRESENT = "present"
    MISSING = "missing"
    UNKNOWN = "unknown"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Shape(_Model):
    """Sizes of a layer's routed experts on one rank, as AITER names them."""

    model_dim: int
    inter_dim: int
    experts: int
    topk: int

    @classmethod
    def of(cls, sizes: Sizes) -> Shape:
        """Of sizes in AITER's order."""
        model_dim, inter_dim, experts, topk = sizes
        return cls(model_dim=model_dim, inter_dim=inter_dim, experts=experts, topk=topk)


class FailureReport(_Model):
    """What was not compiled, where, and why; ``None`` is what AITER does not tell."""

    kernels: tuple[str, ...]
    shape: Shape | None
    tokens: int | None
    why: str

    @classmethod
    def of(cls, failure: Failure) -> FailureReport:
        """For programs."""
        shape = None if failure.sizes is None else Shape.of(failure.sizes)
        return cls(kernels=failure.kernels, shape=shape, tokens=failure.tokens, why=failure.why)


class _Report(_Model):
    schema_version: Literal[1] = SCHEMA_VERSION
    version: str = Field(description="Of this program.")
    profile: str
    architecture: str
    aiter: str = Field(description="Version of AITER.")
    flydsl: str = Field(description="Version of FlyDSL.")
    directory: str = Field(description="For FLYDSL_RUNTIME_CACHE_DIR.")
    notes: tuple[str, ...]


class BuildReport(_Report):
    """How a build came out."""

    state: Literal["built", "failed"]
    table: str
    log: str
    rows: int
    kernels: int = Field(description="Different ones, of all rows.")
    seconds: float
    failures: tuple[FailureReport, ...]

    @property
    def exit_code(self) -> int:
        """0 or 1."""
        return ExitCode.OK if self.state == "built" else ExitCode.FAILED


class KernelReport(_Model):
    """One kernel for one shape."""

    kernel: str
    shape: Shape
    tokens: tuple[int, ...] = Field(description="Padded sizes of steps that need it.")
    state: Presence
    why: str | None = Field(description="Unless it is present.")


class CheckReport(_Report):
    """What is there of what a profile needs."""

    state: Presence = Field(description="missing before unknown before present.")
    kernels: tuple[KernelReport, ...]

    @property
    def exit_code(self) -> int:
        """0 if everything is there, else 1."""
        return ExitCode.OK if self.state is Presence.PRESENT else ExitCode.FAILED


def overall(kernels: tuple[KernelReport, ...]) -> Presence:
    """The worst of all: missing before unknown before present."""
    states = {kernel.state for kernel in kernels}
    return next(
        (state for state in (Presence.MISSING, Presence.UNKNOWN) if state in states), Presence.PRESENT
    )
