# SPDX-License-Identifier: Apache-2.0
"""MXFP4 values of a float tensor by the OCP rule, differentiable straight through.

The same rule as ``kimi_k3.checkpoint.tiny.quantize_mxfp4``, which writes the bytes; a test holds the two
together.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def mxfp4_values(weights: Tensor) -> Tensor:
    """The values that MXFP4 keeps of ``weights [..., K]``, K a multiple of 32; float32.

    A group's scale is ``2 ** (floor(log2(largest magnitude)) - 2)`` (OCP Microscaling Formats 1.0, section
    6.3); magnitudes round to 0, .5, 1, 1.5, 2, 3, 4, 6 of it, ties to even, and stop at 6.
    """
    groups = weights.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    # frexp is exact where log2 is not: the exponent of m * 2 ** e with 0.5 <= m < 1.
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 3)
    scaled = groups / scale
    magnitude = scaled.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = (torch.round(magnitude / step) * step).clamp(max=6.0)
    return torch.where(largest > 0, rounded * scaled.sign() * scale, 0.0).flatten(-2)


def through_mxfp4(weights: Tensor) -> Tensor:
    """``mxfp4_values`` forward; backward as if it were the identity."""
    return weights + (mxfp4_values(weights) - weights).detach()
