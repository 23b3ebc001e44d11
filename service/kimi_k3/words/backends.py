# SPDX-License-Identifier: Apache-2.0
"""Which kernels compute the experts: what is asked of vLLM, and what it answers."""

from __future__ import annotations

from enum import StrEnum

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
    """A layer's experts on one rank of a start, as far as the choice depends on them.

    Attributes:
        int4: whether int4 is asked for.
        hidden: width of an expert's input and output.
        intermediate: width between its projections, on the rank.
        experts: of the layer.
        local_experts: of the rank.
        top_k: experts of a token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    int4: bool
    hidden: int
    intermediate: int
    experts: int
    local_experts: int
    top_k: int


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
