# SPDX-License-Identifier: Apache-2.0
"""Holding an experts' kernel against float32: what is asked of it, and what it answers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from kimi_k3.words.backends import Request

MARK = "kimi-k3: proof: "

PRODUCTION = Request(int4=True, hidden=3584, intermediate=3072, experts=896, local_experts=112, top_k=15)
"""One rank of eight with expert parallelism, as the kernels' authors compared it
(vllm-project/vllm#51274)."""

REDUCED = Request(int4=True, hidden=256, intermediate=384, experts=24, local_experts=24, top_k=4)
"""For CPUs, whose kernels are readable torch: seconds instead of minutes, and 10 MB instead of 2 GB."""


class Measured(BaseModel):
    """One batch.

    Attributes:
        tokens: of it.
        signed: whether scales had both signs.
        error: of the worst token, root of squared differences over squared values; ``None`` if the answer is
            no number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int
    signed: bool
    error: float | None


class Proven(BaseModel):
    """Who was asked, told before the first batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str
    vllm: str
    platform: str
    architecture: str | None
    tolerance: float
    batches: tuple[int, ...]
