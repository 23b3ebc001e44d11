# SPDX-License-Identifier: Apache-2.0
"""The conversion as the tables state it: torch operations on any device, to be read, not to be fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from kimi_k3.conversion.candidates import (
    E8M0_BIAS,
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
    """A rule as tensors: a row per option, and 16 columns, one per E2M1 code.

    Attributes:
        bits: ``[option]`` int32, bf16 bits of the scale at exponent 0.
        levels: ``[option, code]`` int8.
        squares: ``[option, code]`` int64, squared errors in units of ``2^-(2 * fraction_bits)``.
        errors: ``[option, code]`` float64.
    """

    bits: torch.Tensor
    levels: torch.Tensor
    squares: torch.Tensor
    errors: torch.Tensor


@cache
def _tables(rule: Rule, device: torch.device) -> _Tables:
    options = rule.options
    return _Tables(
        bits=torch.tensor([one.bits for one in options], dtype=torch.int32, device=device),
        levels=torch.tensor([one.levels for one in options], dtype=torch.int8, device=device),
        squares=torch.tensor([rule.squares(one.errors) for one in options], device=device),
        errors=torch.tensor([one.errors for one in options], dtype=torch.float64, device=device),
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
        option = torch.stack([row[codes].sum(-1) for row in tables.squares], dim=-1).argmin(-1)
    else:
        of_byte, of_code = byte + rule.clamped_offset, (largest - 1).clamp(min=0)
        option = torch.where(clamped & ~dropped, of_byte, of_code) * len(rule.signs)
    chosen = (option[..., None], codes)

    lost = zero | nonfinite | dropped
    levels = torch.where(lost[..., None], 0, tables.levels[chosen])
    bits = tables.bits[option] + 128 * (e8m0.int() - E8M0_BIAS)
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
