# SPDX-License-Identifier: Apache-2.0
"""Proving the conversion on this device before it is used: random MXFP4 against the readable reference.

The canary proves the kernel with weights of its own. A conversion that a compiler got wrong would write other
weights than it reports, and what it reports of its loss would come from the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from kimi_k3.conversion import reference
from kimi_k3.conversion.candidates import GROUP_SIZE, Rule
from kimi_k3.words.weights import Int4Layout

EXPERTS, ROWS = 2, 256
EXPONENTS = 96, 160
"""E8M0 bytes from the first up to the second: far beyond those of trained weights on both sides."""

Convert = Callable[[torch.Tensor, torch.Tensor, Rule, Int4Layout], tuple[torch.Tensor, object]]
"""Overwrites the packed weights and returns the scales, as ``conversion.experts.convert_experts_``."""


def difference(
    convert: Convert, rule: Rule, layout: Int4Layout, columns: Iterable[int], device: torch.device
) -> str | None:
    """What a conversion does otherwise than the reference, in words; ``None`` if every bit is the same.

    Args:
        convert: what will be used.
        columns: widths of the matrices that it will be used on.
        device: where.
    """
    for width in columns:
        packed, e8m0 = _mxfp4(width)
        expected, expected_scales, _ = reference.convert(packed, e8m0, rule, layout)
        found = packed.to(device)
        scales, _ = convert(found, e8m0.to(device), rule, layout)
        for what, ours, theirs in (
            ("weights", found.cpu(), expected),
            ("scales", scales.cpu().view(torch.int16), expected_scales.view(torch.int16)),
        ):
            wrong = int((ours != theirs).sum())
            if wrong:
                return f"{wrong:,} of {theirs.numel():,} {what} of matrices with {width} columns"
    return None


def _mxfp4(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same random experts every time, on the CPU."""
    random = torch.Generator(device="cpu").manual_seed(columns)

    def bytes_from(first: int, end: int, width: int) -> torch.Tensor:
        shape = (EXPERTS, ROWS, width)
        return torch.randint(first, end, shape, generator=random, device="cpu", dtype=torch.uint8)

    return bytes_from(0, 256, columns // 2), bytes_from(*EXPONENTS, columns // GROUP_SIZE)
