# SPDX-License-Identifier: Apache-2.0
"""aiter/ops/shuffle.py: what vLLM's own conversion calls."""

from __future__ import annotations

import torch


def shuffle_weight(x: torch.Tensor, layout: tuple[int, int] = (16, 16)) -> torch.Tensor:
    """Strips of 16 rows; within one, per 32 columns, two runs of 16 bytes of each row."""
    rows, columns = layout[0], layout[1] * 2
    per_lane = 16 // x.element_size()
    tiles = x.view(-1, x.shape[-2] // rows, rows, x.shape[-1] // columns, columns // per_lane, per_lane)
    shuffled = tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(x.shape)
    shuffled.is_shuffled = True  # type: ignore[attr-defined]
    return shuffled


def pack_int8_to_packed_int4(x_shuf_i8: torch.Tensor) -> torch.Tensor:
    """Of eight values ``v0..v7`` the bytes ``v0 | v4 << 4, ..., v3 | v7 << 4``."""
    runs = (x_shuf_i8.contiguous().view(-1, 8).to(torch.int16) & 0xF).to(torch.uint8)
    return (runs[:, :4] | (runs[:, 4:] << 4)).reshape(-1).to(torch.int8)


def shuffle_scale_for_int4(scale: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """``[E, G, N]`` to ``[E, G / 2, N, 2]``."""
    if group_size != 32:
        raise ValueError(f"shuffle_scale_for_int4 only supports group_size=32, got {group_size}")
    experts, groups, rows = scale.shape
    return scale.view(experts, groups // 2, 2, rows).permute(0, 1, 3, 2).contiguous()
