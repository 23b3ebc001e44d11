# SPDX-License-Identifier: Apache-2.0
"""aiter/ops/quant.py: what vLLM's own conversion calls."""

from __future__ import annotations

import torch


def per_1x32_i4_quant(weight: torch.Tensor, group_size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels from -7 to 7 ``[..., N, K]`` and scales ``[..., K / 32, N]``, computed in the weight's dtype."""
    groups = weight.unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(dim=-1).clamp(min=1e-6) / 7.0
    levels = (groups / scale.unsqueeze(-1)).round().clamp(-7, 7).to(torch.int8).flatten(-2)
    return levels, scale.transpose(-1, -2).contiguous().to(torch.bfloat16)
