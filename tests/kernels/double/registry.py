# SPDX-License-Identifier: Apache-2.0
"""In the place of aiter/ops/flydsl/moe_kernels.py: names of kernels, and launching one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flydsl.compiler.jit_function import launch

MODES = tuple(Path(__file__).with_name("modes.txt").read_text().split())
"""Of second stages: the first generation has one, later ones two."""

_FIRST = re.compile(r"flydsl_moe1_abf16_wint4_bf16_t(\d+)x(\d+)x(\d+)(_bnt0)?(_kw[24])?")
_SECOND = re.compile(r"flydsl_moe2_abf16_wint4_bf16_t(\d+)x(\d+)x(\d+)_(\w+)")


def get_flydsl_kernel_params(name: str) -> dict[str, Any] | None:
    """What a name means; None if there is no such kernel."""
    if match := _FIRST.fullmatch(name):
        return {"stage": 1, "tiles": "x".join(match.groups()[:3]), "options": f"{match[4]}{match[5]}"}
    match = _SECOND.fullmatch(name)
    if match is None or match[4] not in MODES:
        return None
    return {"stage": 2, "tiles": "x".join(match.groups()[:3]), "mode": match[4]}


def launch_stage(name: str, *, model_dim: int, inter_dim: int, experts: int, topk: int) -> None:
    """As flydsl_moe_stage1 and flydsl_moe_stage2 do with int4."""
    params = get_flydsl_kernel_params(name)
    if params is None:
        raise ValueError(f"Invalid FlyDSL kernel name: {name}")
    sizes = {"h": model_dim, "i": inter_dim, "ne": experts}
    # The number of experts per token is a closure's value of both, though no instruction depends on it.
    launch(f"launch_gemm{params['stage']}", name, {**sizes, "tiles": params["tiles"]}, {"topk": topk})
    if params.get("mode") == "reduce":
        launch("launch_moe_reduce", name, {"h": model_dim, "topk": topk}, {})
