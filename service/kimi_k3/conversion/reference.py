# SPDX-License-Identifier: Apache-2.0
"""The conversion as the tables state it: torch operations on any device, to be read, not to be fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from kimi_k3.conversion.candidates import (
    E8M0_NAN,
    GROUP_SIZE,
    INFINITE_SCALE_BITS,
    MAGNITUDES,
    NAN_SCALE_BITS,
    NONFINITE_FROM,
    ZERO_SCALE_BITS,
    Rule,
)
from kimi_k3.conversion.layout import arrange_levels, arrange_scales, check_shape
from kimi_k3.conversion.loss import Tally
from kimi_k3.conversion.mxfp4 import exponents, pack_nibbles, unpack_nibbles

if TYPE_CHECKING:
    from kimi_k3.words.weights import Int4Layout


@dataclass(frozen=True)
class _Tables:
    """A rule as tensors. Axis s is the sign of the scale, c the candidate, code the 16 E2M1 codes.

    Attributes:
        bits: ``[c]`` int32, bf16 bits of the positive scale at exponent 0.
        levels: ``[c, s, code]`` int8.
        squares: ``[c, s, code]`` int64, squared errors in units of ``2^-(2 * fraction_bits)``.
        errors: ``[c, s, code]`` float64.
    """

    bits: torch.Tensor
    levels: torch.Tensor
    squares: torch.Tensor
    errors: torch.Tensor


@cache
def _tables(rule: Rule, device: torch.device) -> _Tables:
    levels, errors = [], []
    for candidate in rule.candidates:
        # Codes 0-7 are positive, 8-15 negative. With a positive scale the negative side is the long one.
        up = (*candidate.short, *(-level for level in candidate.long))
        down = (*(-level for level in candidate.long), *candidate.short)
        up_errors = (*candidate.short_errors, *candidate.long_errors)
        down_errors = (*candidate.long_errors, *candidate.short_errors)
        levels.append([up if sign > 0 else down for sign in rule.signs])
        errors.append([up_errors if sign > 0 else down_errors for sign in rule.signs])
    return _Tables(
        bits=torch.tensor(
            [candidate.bits for candidate in rule.candidates], dtype=torch.int32, device=device
        ),
        levels=torch.tensor(levels, dtype=torch.int8, device=device),
        squares=torch.tensor(
            [[rule.squares(side) for side in both] for both in errors], dtype=torch.int64, device=device
        ),
        errors=torch.tensor(errors, dtype=torch.float64, device=device),
    )


def convert(
    packed: torch.Tensor, e8m0: torch.Tensor, rule: Rule, layout: Int4Layout
) -> tuple[torch.Tensor, torch.Tensor, Tally]:
    """Convert experts, out of place.

    Args:
        packed: ``[E, N, K / 2]`` uint8, MXFP4.
        e8m0: ``[E, N, K / 32]`` uint8.
        rule: how scales are chosen.
        layout: of the result.

    Returns:
        The int4 nibbles, ``[E, N, K / 2]`` uint8; the scales, bf16 in the layout's shape; and what was
        counted, one part per row. Groups with non-finite values get the scales that AITER gives them, and
        levels 0.

    Raises:
        ValueError: the layout cannot hold the shape.
    """
    check_shape(layout, *e8m0.shape[1:])
    tables = _tables(rule, packed.device)
    codes = unpack_nibbles(packed).unflatten(-1, (-1, GROUP_SIZE)).long()  # [E, N, G, 32]
    magnitudes = codes & 7
    largest = magnitudes.amax(-1)
    byte = e8m0.long()

    nonfinite = byte >= torch.tensor(NONFINITE_FROM, device=packed.device)[largest]
    zero = (largest == 0) & ~nonfinite
    clamped = (byte < torch.tensor(rule.normal_from, device=packed.device)[largest]) & ~zero
    dropped = clamped & (byte < rule.dropped_below)

    if rule.by_error:
        errors = torch.stack([row[codes].sum(-1) for row in tables.squares.flatten(0, 1)], dim=-1)
        best = errors.argmin(-1)
        candidate, sign = best // len(rule.signs), best % len(rule.signs)
    else:
        candidate = torch.where(clamped & ~dropped, 7 + byte - rule.dropped_below, (largest - 1).clamp(min=0))
        sign = torch.zeros_like(candidate)
    chosen = (candidate[..., None], sign[..., None], codes)

    lost = zero | nonfinite | dropped
    levels = torch.where(lost[..., None], 0, tables.levels[chosen])
    negative = torch.tensor([value < 0 for value in rule.signs], device=packed.device)[sign]
    bits = tables.bits[candidate] + 128 * (e8m0.int() - 127) + 0x8000 * negative
    bits = torch.where(zero | dropped, ZERO_SCALE_BITS, bits)
    bits = torch.where(nonfinite, torch.where(byte == E8M0_NAN, NAN_SCALE_BITS, INFINITE_SCALE_BITS), bits)
    scales = bits.to(torch.uint16).view(torch.bfloat16)

    values = torch.tensor(MAGNITUDES, dtype=torch.float64, device=packed.device)[magnitudes]
    error = torch.where(dropped[..., None], values, tables.errors[chosen])
    unit = exponents(e8m0).masked_fill(nonfinite, 0.0)
    tally = Tally(
        groups_per_expert=e8m0[0].numel(),
        lossless=((error == 0).all(-1) & ~nonfinite).sum(-1).cpu().numpy(),
        zero=zero.sum(-1).cpu().numpy(),
        nonfinite=nonfinite.sum(-1).cpu().numpy(),
        clamped=clamped.sum(-1).cpu().numpy(),
        squared_error=(error.square().sum(-1) * unit.square()).sum(-1).cpu().numpy(),
        energy=(values.square().sum(-1) * unit.square()).sum(-1).cpu().numpy(),
        max_error=(error.amax(-1) * unit).amax(-1).cpu().numpy(),
    )
    nibbles = (levels.flatten(-2) & 0xF).view(torch.uint8)
    return pack_nibbles(arrange_levels(nibbles, layout)), arrange_scales(scales, layout), tally
