# SPDX-License-Identifier: Apache-2.0
"""aiter/utility/fp4_utils.py: what vLLM's own conversion calls."""

from __future__ import annotations

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_to_f32(x: torch.Tensor) -> torch.Tensor:
    """Two values of each byte, the low nibble first."""
    raw = x.view(torch.uint8)
    nibbles = torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)
    return torch.tensor(VALUES + tuple(-value for value in VALUES))[nibbles.long()]


def e8m0_to_f32(scale_e8m0_biased: torch.Tensor) -> torch.Tensor:
    """``2 ** (byte - 127)``; 255 is NaN."""
    raw = scale_e8m0_biased.view(torch.uint8)
    bits = raw.to(torch.int32) << 23
    bits[raw == 0] = 0x00400000
    bits[raw == 255] = 0x7F800001
    return bits.view(torch.float32)
