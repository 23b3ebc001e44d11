# SPDX-License-Identifier: Apache-2.0
"""aiter/ops/flydsl/kernels/moe_2stage_a16wmix: only its signature is looked at, and its refusals copied."""

from __future__ import annotations

import os
from typing import Any

TILE_K = 128


def flydsl_a16w4_gemm1(*, D_HIDDEN: int, D_INTER: int, act: str = "silu", **rest: Any) -> None:
    """Refuse what the kernel refuses."""
    if act not in ("silu", "situv2"):
        raise AssertionError(act)
    if D_HIDDEN % TILE_K or (2 * D_INTER) % 256:
        raise NotImplementedError(f"D_HIDDEN={D_HIDDEN}, D_INTER={D_INTER}")


if os.environ.get("DOUBLE_FAULT") == "old":

    def flydsl_a16w4_gemm1(*, D_HIDDEN: int, D_INTER: int, **rest: Any) -> None:  # type: ignore[misc]
        """Before pull request 4646: no activation but SiLU."""
