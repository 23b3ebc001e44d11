# SPDX-License-Identifier: Apache-2.0
"""Nibbles and values of MXFP4 and int4 matrices, in torch, to be read.

A group is 32 consecutive weights along the input dimension: 32 nibbles, two per byte with the even column in
the low one, and a scale: one E8M0 byte ``b`` for ``2 ** (b - 127)``, NaN if 255, for MXFP4 (OCP Microscaling
Formats 1.0, sections 5.2-5.4); one bf16 number for int4.
"""

from __future__ import annotations

import torch

from kimi_k3.conversion.candidates import E8M0_BIAS, E8M0_NAN, GROUP_SIZE, MAGNITUDES


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """``[..., K / 2]`` uint8 to ``[..., K]`` uint8 in 0-15, the low nibble first."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`unpack_nibbles`."""
    low, high = nibbles.unflatten(-1, (-1, 2)).unbind(-1)
    packed: torch.Tensor = low | (high << 4)
    return packed


def exponents(e8m0: torch.Tensor) -> torch.Tensor:
    """``2 ** (b - 127)`` of E8M0 bytes, float64; NaN for 255."""
    unit = torch.ldexp(torch.ones_like(e8m0, dtype=torch.float64), e8m0.to(torch.int32) - E8M0_BIAS)
    return unit.masked_fill(e8m0 == E8M0_NAN, torch.nan)


def dequantize_mxfp4(packed: torch.Tensor, e8m0: torch.Tensor) -> torch.Tensor:
    """Values of an MXFP4 matrix.

    Args:
        packed: ``[..., K / 2]`` uint8.
        e8m0: ``[..., K / 32]`` uint8.

    Returns:
        ``[..., K]`` float32, exact: an E2M1 magnitude times a power of two.
    """
    table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device=packed.device)
    values = table[unpack_nibbles(packed).long()].unflatten(-1, (-1, GROUP_SIZE))
    scaled: torch.Tensor = values * exponents(e8m0).float().unsqueeze(-1)
    return scaled.flatten(-2)


def dequantize_int4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values that the kernel multiplies with: ``bf16(q * scale)``, as float32.

    Args:
        packed: ``[..., K / 2]`` uint8, plain layout.
        scales: ``[..., K / 32]`` bf16.

    Returns:
        ``[..., K]`` float32.
    """
    # Sign extension: shift the nibble to the top of an int8 and back.
    levels = (unpack_nibbles(packed) << 4).view(torch.int8) >> 4
    grouped: torch.Tensor = levels.float().unflatten(-1, (-1, GROUP_SIZE)) * scales.float().unsqueeze(-1)
    return grouped.to(torch.bfloat16).float().flatten(-2)
