# SPDX-License-Identifier: Apache-2.0
"""aiter/fused_moe.py for bf16 activations and packed int4 weights, decoded from the bytes it is given.

Every call is kept in ``CALLS``.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from aiter import ActivationType, QuantType, dtypes
from aiter.ops.flydsl.kernels.moe_2stage_a16wmix import flydsl_a16w4_gemm1
from aiter.ops.flydsl.moe_common import GateMode

FAULTS = ("nibbles", "pairs", "silu", "signs", "eight")
CALLS: list[dict[str, Any]] = []


def fault() -> str:
    return os.environ.get("DOUBLE_FAULT", "")


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: int = ActivationType.Silu,
    quant_type: int = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    splitk: int = 0,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str | None = GateMode.SEPARATED.value,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over a token's experts, ``[M, model_dim]``."""
    CALLS.append({"w1": w1, "w2": w2, "w1_scale": w1_scale, "w2_scale": w2_scale, "topk_ids": topk_ids})
    assert GateMode(gate_mode) is GateMode.SEPARATED
    experts, model_dim, inter_dim = w2.shape
    inter_dim *= model_dim // w1.shape[-1]
    assert w1.shape[1] in (inter_dim, 2 * inter_dim), "Invalid MoE weight"
    assert dtype in (torch.float16, torch.bfloat16), "Fused_moe unsupported out dtype"
    assert QuantType(quant_type) is QuantType.per_1x32
    assert w1.dtype == dtypes.i4x2, "not int4: another path"
    # AITER is content with one of them; both are what vLLM's own conversion hands over.
    assert getattr(w1, "is_shuffled", False) and getattr(w2, "is_shuffled", False)  # noqa: PT018
    assert w1_scale is not None
    assert w2_scale is not None
    act = "situv2" if ActivationType(activation) is ActivationType.Situv2 else "silu"
    flydsl_a16w4_gemm1(D_HIDDEN=model_dim, D_INTER=inter_dim, act=act)
    bounds = (1.0 if beta is None else beta, 1.0 if linear_beta is None else linear_beta)
    local = _local_ids(topk_ids, expert_mask)
    gate_up = weights(w1, w1_scale, experts, 2 * inter_dim, model_dim)
    down = weights(w2, w2_scale, experts, model_dim, inter_dim)
    total = torch.zeros(len(hidden_states), model_dim, dtype=dtype)
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = (local == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[tokens].float() @ gate_up[expert].T).chunk(2, dim=-1)
        middle = _activate(gate, up, act, *bounds).to(torch.bfloat16).float()
        out = middle @ down[expert].T * topk_weight[tokens, slots].unsqueeze(-1)
        total.index_add_(0, tokens, out.to(total.dtype))
    return total


def weights(packed: torch.Tensor, scale: torch.Tensor, experts: int, rows: int, columns: int) -> torch.Tensor:
    """``bf16(level * scale)`` of the bytes, undone step by step: packing, then shuffling."""
    raw = packed.view(torch.uint8).reshape(-1, 4)
    halves = [raw & 0xF, raw >> 4]
    if fault() == "nibbles":
        halves.reverse()
    nibbles = torch.cat(halves, dim=1).view(-1)
    shuffled = nibbles.view(experts, rows // 16, columns // 32, 2, 16, 16)
    plain = shuffled.permute(0, 1, 4, 2, 3, 5).reshape(experts, rows, columns).to(torch.int16)
    levels = torch.where(plain > (8 if fault() == "eight" else 7), plain - 16, plain).float()
    pairs = scale.view(experts, columns // 64, rows, 2).float()
    if fault() == "pairs":
        pairs = pairs.flip(-1)
    if fault() == "signs":
        pairs = pairs.abs()
    scales = pairs.permute(0, 2, 1, 3).reshape(experts, rows, columns // 32)
    return (levels * scales.repeat_interleave(32, dim=-1)).to(torch.bfloat16).float()


def _activate(
    gate: torch.Tensor, up: torch.Tensor, act: str, beta: float, linear_beta: float
) -> torch.Tensor:
    if act == "silu" or fault() == "silu":
        return torch.nn.functional.silu(gate) * up
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def _local_ids(topk_ids: torch.Tensor, expert_mask: torch.Tensor | None) -> torch.Tensor:
    """Global ids become positions among the experts whose mask is 1; others -1."""
    if expert_mask is None:
        return topk_ids
    positions = expert_mask.cumsum(0) - 1
    positions[expert_mask == 0] = -1
    return positions[topk_ids.long()]
