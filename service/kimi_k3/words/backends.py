# SPDX-License-Identifier: Apache-2.0
"""Which kernels compute the experts: what is asked of vLLM, and what it answers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

AITER_INT4 = "AITER_INT4_BF16"
"""int4 through AITER's FlyDSL kernels. vLLM itself calls it by the name of the MXFP4 back end whose Python it
shares, ``AITER_MXFP4_BF16``."""

CPU_INT4 = "CPU_INT4"
CPU_MXFP4 = "CPU_MXFP4"
MARK = "kimi-k3: back ends: "


class Verdict(StrEnum):
    """What becomes of a back end."""

    CHOSEN = "chosen"
    POSSIBLE = "possible"
    NO = "no"


class Request(BaseModel):
    """A start, as far as the choice depends on it.

    Attributes:
        config: path of the checkpoint's ``config.json``.
        int4: whether int4 is asked for.
        ranks: among which the experts are cut or distributed.
        expert_parallel: whether they are distributed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Path
    int4: bool
    ranks: int
    expert_parallel: bool


class Row(BaseModel):
    """One back end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    what: str
    verdict: Verdict
    why: str


class Answer(BaseModel):
    """All back ends that can be thought of for Kimi-K3's experts, on one machine.

    ``architecture`` is the GPU's, ``None`` on other platforms than ROCm.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    vllm: str
    platform: str
    architecture: str | None
    rows: tuple[Row, ...]
