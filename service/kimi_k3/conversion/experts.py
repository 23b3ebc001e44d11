# SPDX-License-Identifier: Apache-2.0
"""Converting a projection's experts in place, on the device where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kimi_k3.conversion.candidates import Rule
    from kimi_k3.conversion.loss import Loss
    from kimi_k3.words.weights import Int4Layout


def convert_experts_(
    packed: torch.Tensor, e8m0: torch.Tensor, rule: Rule, layout: Int4Layout, *, allow_nonfinite: bool = False
) -> tuple[torch.Tensor, tuple[Loss, ...]]:
    """Overwrite MXFP4 with int4, which takes as many bytes; only the scales need new memory.

    Args:
        packed: ``[E, N, K / 2]`` uint8, contiguous; MXFP4 on entry, int4 nibbles on return.
        e8m0: ``[E, N, K / 32]`` uint8, contiguous.
        rule: how scales are chosen.
        layout: of the result.
        allow_nonfinite: whether groups with NaN or infinite values are converted, as AITER does.

    Returns:
        The scales, bf16 in the layout's shape, and the loss of every expert.

    Raises:
        ValueError: the layout cannot hold the shape.
        NonFiniteGroupError: names the first such group. The weights are then of no further use.
    """
    # Imported when they are needed: Triton is not on every machine that converts on its CPU, and before its
    # worker is set up vLLM 0.32 looks into every loaded module, which llvmlite, below numba, does not
    # survive.
    if packed.device.type == "cpu":
        from kimi_k3.conversion import cpu

        bits, tally = cpu.convert(packed.numpy(), e8m0.numpy(), rule, layout, allow_nonfinite=allow_nonfinite)
        return torch.from_numpy(bits).view(torch.bfloat16), tally.losses()
    from kimi_k3.conversion import gpu

    scales, tally = gpu.convert(packed, e8m0, rule, layout, allow_nonfinite=allow_nonfinite)
    return scales, tally.losses()
