# SPDX-License-Identifier: Apache-2.0
"""MXFP4 as it stands in the checkpoint.

A group is 32 consecutive weights along the input dimension: 32 E2M1 codes, two per byte with the
even column in the low nibble, and one E8M0 byte ``b`` that scales them by ``2 ** (b - 127)``
(OCP Microscaling Formats 1.0, sections 5.2-5.4). ``b == 255`` is NaN.
"""

from __future__ import annotations

import torch

GROUP_SIZE = 32
"""Weights per scale, in MXFP4 and in int4_per_group_32 alike."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the E2M1 codes 0-7; bit 3 of a code is the sign."""

E8M0_BIAS = 127
E8M0_NAN = 255


class NonFiniteScaleError(ValueError):
    """A group whose scale is NaN; ``expert``, ``row`` and ``group`` say which."""

    def __init__(self, expert: int, row: int, group: int) -> None:
        super().__init__(f"expert {expert}, row {row}, group {group}: the E8M0 scale is NaN (0xFF)")
        self.expert, self.row, self.group = expert, row, group


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Codes of packed nibbles, the low nibble first.

    Args:
        packed: ``[..., K / 2]`` uint8.

    Returns:
        ``[..., K]`` uint8 in 0-15.
    """
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`unpack_codes`."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    packed: torch.Tensor = low | (high << 4)
    return packed


def group_scale(e8m0: torch.Tensor) -> torch.Tensor:
    """``2 ** (b - 127)`` of E8M0 bytes, float32; exact for every finite ``b``."""
    return torch.ldexp(torch.ones_like(e8m0, dtype=torch.float32), e8m0.to(torch.int32) - E8M0_BIAS)


def dequantize_mxfp4(packed: torch.Tensor, e8m0: torch.Tensor) -> torch.Tensor:
    """Values of an MXFP4 matrix.

    Args:
        packed: ``[..., K / 2]`` uint8.
        e8m0: ``[..., K / 32]`` uint8.

    Returns:
        ``[..., K]`` float32, exact: an E2M1 magnitude times a power of two.
    """
    table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device=packed.device)
    values = table[unpack_codes(packed).long()].unflatten(-1, (-1, GROUP_SIZE))
    scaled: torch.Tensor = values * group_scale(e8m0).unsqueeze(-1)
    return scaled.flatten(-2)
