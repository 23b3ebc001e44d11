# SPDX-License-Identifier: Apache-2.0
"""Where the nibbles and scales of an expert stand.

``plain``: as in the checkpoint. Weights ``[E, N, K / 2]``, the even column in the low nibble; scales
``[E, N, K / 32]``.

``aiter``: what AITER's FlyDSL int4 kernels read, ``shuffle_weight((16, 16))`` followed by
``pack_int8_to_packed_int4``, and ``shuffle_scale_for_int4``. Weights: rows in strips of 16; within a strip,
per group, first the group's even halves of all 16 rows, then the odd ones; a run of 8 values v0..v7 is the
four bytes ``v0|v4<<4, v1|v5<<4, v2|v6<<4, v3|v7<<4``. So every 32-bit word of the plain layout becomes one
32-bit word of the same strip, which is what makes a conversion in place possible. Scales: ``[E, G / 2, N,
2]``, the pair being an even group and the odd one behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kimi_k3.words.weights import Int4Layout

if TYPE_CHECKING:
    import torch

STRIP_ROWS = 16
"""Rows that the AITER layout interleaves."""

WORDS_PER_GROUP = 4
"""32-bit words of a group's 32 nibbles."""


def check_shape(layout: Int4Layout, rows: int, groups: int) -> None:
    """Refuse matrices that the layout cannot hold.

    Raises:
        ValueError: says which dimension must be a multiple of what.
    """
    if layout is Int4Layout.AITER and (rows % STRIP_ROWS or groups % 2):
        raise ValueError(
            f"layout aiter needs rows in multiples of {STRIP_ROWS} and columns in multiples of 64, "
            f"got {rows} rows and {groups * 32} columns"
        )


def arrange_levels(levels: torch.Tensor, layout: Int4Layout) -> torch.Tensor:
    """``[E, N, K]`` nibbles in the order of the layout's nibbles, the low one of a byte first."""
    if layout is Int4Layout.PLAIN:
        return levels
    experts, rows, columns = levels.shape
    words = levels.view(experts, rows // STRIP_ROWS, STRIP_ROWS, columns // 32, 2, 2, 2, 4)
    # strip, row, group, half, word of the half, nibbles 0-3 or 4-7, nibble
    return words.permute(0, 1, 3, 4, 2, 5, 7, 6).reshape(experts, rows, columns)


def restore_levels(arranged: torch.Tensor, layout: Int4Layout) -> torch.Tensor:
    """The inverse of :func:`arrange_levels`."""
    if layout is Int4Layout.PLAIN:
        return arranged
    experts, rows, columns = arranged.shape
    words = arranged.view(experts, rows // STRIP_ROWS, columns // 32, 2, STRIP_ROWS, 2, 4, 2)
    return words.permute(0, 1, 4, 2, 3, 5, 7, 6).reshape(experts, rows, columns)


def arrange_scales(scales: torch.Tensor, layout: Int4Layout) -> torch.Tensor:
    """``[E, N, G]`` scales in the layout's order and shape."""
    if layout is Int4Layout.PLAIN:
        return scales
    experts, rows, groups = scales.shape
    return scales.view(experts, rows, groups // 2, 2).transpose(1, 2).contiguous()


def restore_scales(arranged: torch.Tensor, layout: Int4Layout) -> torch.Tensor:
    """The inverse of :func:`arrange_scales`."""
    if layout is Int4Layout.PLAIN:
        return arranged
    experts, pairs, rows, _ = arranged.shape
    return arranged.transpose(1, 2).reshape(experts, rows, 2 * pairs)
