# SPDX-License-Identifier: Apache-2.0
"""Converting experts from MXFP4 to int4_per_group_32, in place, one expert at a time.

Layout ("plain"): two's-complement nibbles, the even column in the low one, and one bf16 scale per
group, both in the checkpoint's order. Packed int4 is as large as packed MXFP4, so the weights are
overwritten; only the scales (two bytes for one) need new memory, and the work space is that of one
expert. The torch operations run on any device; they are written to be read, not to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kimi_k3.conversion.candidates import (
    EXPONENTS,
    ZERO_GROUP_SCALE_BITS,
    Candidate,
    amax_candidates,
    mse_candidates,
)
from kimi_k3.conversion.loss import Loss
from kimi_k3.conversion.mxfp4 import (
    E8M0_NAN,
    GROUP_SIZE,
    MAGNITUDES,
    NonFiniteScaleError,
    group_scale,
    pack_codes,
    unpack_codes,
)


class ExponentRangeError(ValueError):
    """A group whose scale bf16 cannot hold with full precision; says which."""

    def __init__(self, expert: int, row: int, group: int, exponent: int, rule: str) -> None:
        legal = EXPONENTS[rule]
        super().__init__(
            f"expert {expert}, row {row}, group {group}: E8M0 scale {exponent} is outside "
            f"{legal.start}-{legal.stop - 1}, where rule {rule} is defined"
        )
        self.expert, self.row, self.group = expert, row, group


@dataclass(frozen=True)
class _Tables:
    """A rule's candidates as tensors: ``scales[c]``, ``levels[c, code]``, ``errors[c, code]``."""

    scales: torch.Tensor
    levels: torch.Tensor
    errors: torch.Tensor


@cache
def _tables(rule: str, device: torch.device) -> _Tables:
    candidates: tuple[Candidate, ...] = {"mse": mse_candidates, "amax": amax_candidates}[rule]()
    return _Tables(
        scales=torch.tensor([c.scale for c in candidates], dtype=torch.float32, device=device),
        levels=torch.tensor([c.levels for c in candidates], dtype=torch.int8, device=device),
        # float64 holds every sum of 32 squared errors exactly: each error has at most 8 fraction
        # bits below 2^-8 and is below 6, so squares need fewer than 40 bits.
        errors=torch.tensor([c.errors for c in candidates], dtype=torch.float64, device=device),
    )


def convert_experts_(packed: torch.Tensor, e8m0: torch.Tensor, rule: str) -> tuple[torch.Tensor, Loss]:
    """Convert a projection's experts, overwriting ``packed`` with int4.

    Args:
        packed: ``[E, N, K / 2]`` uint8, MXFP4 on entry, int4 nibbles on return.
        e8m0: ``[E, N, K / 32]`` uint8.
        rule: ``"mse"`` or ``"amax"``.

    Returns:
        The scales, ``[E, N, K / 32]`` bf16, and the loss.

    Raises:
        NonFiniteScaleError: a group's scale is NaN.
        ExponentRangeError: a group's scale is too small or too large for bf16.
            In both cases nothing has been overwritten.
    """
    _check_exponents(packed, e8m0, EXPONENTS[rule], rule)
    tables = _tables(rule, packed.device)
    scales = torch.empty(e8m0.shape, dtype=torch.bfloat16, device=packed.device)
    loss = Loss()
    for expert in range(packed.shape[0]):
        nibbles, scales[expert], expert_loss = _convert(packed[expert], e8m0[expert], rule, tables)
        packed[expert].copy_(nibbles)
        loss += expert_loss
    return scales, loss


def _check_exponents(packed: torch.Tensor, e8m0: torch.Tensor, legal: range, rule: str) -> None:
    bad = (e8m0 == E8M0_NAN).nonzero()
    if len(bad):
        raise NonFiniteScaleError(*bad[0].tolist())
    outside = (e8m0 < legal.start) | (e8m0 >= legal.stop)
    for expert, row, group in outside.nonzero().tolist():
        # A group of zeros (codes 0 and 8) is exact whatever its scale.
        half = GROUP_SIZE // 2
        if bool((packed[expert, row, group * half : (group + 1) * half] & 0x77).any()):
            raise ExponentRangeError(expert, row, group, int(e8m0[expert, row, group]), rule)


def _convert(
    packed: torch.Tensor, e8m0: torch.Tensor, rule: str, tables: _Tables
) -> tuple[torch.Tensor, torch.Tensor, Loss]:
    codes = unpack_codes(packed).unflatten(-1, (-1, GROUP_SIZE)).long()  # [N, G, 32]
    magnitudes = codes & 7
    zero = (magnitudes == 0).all(-1)
    squared = tables.errors.square()
    if rule == "amax":
        choice = magnitudes.amax(-1)
    else:
        choice = torch.stack([squared[c][codes].sum(-1) for c in range(len(tables.scales))]).argmin(0)
    errors = tables.errors[choice.unsqueeze(-1), codes]
    levels = tables.levels[choice.unsqueeze(-1), codes]
    unit = group_scale(e8m0)
    scales = (tables.scales[choice] * unit).to(torch.bfloat16)
    zero_scale = torch.tensor(ZERO_GROUP_SCALE_BITS, dtype=torch.int16, device=packed.device)
    scales[zero] = zero_scale.view(torch.bfloat16)

    exact_unit = unit.double()
    values = torch.tensor(MAGNITUDES, dtype=torch.float64, device=packed.device)[magnitudes]
    loss = Loss(
        groups=zero.numel(),
        lossless_groups=int((errors == 0).all(-1).sum()),
        zero_groups=int(zero.sum()),
        squared_error=float((errors.square().sum(-1) * exact_unit.square()).sum()),
        energy=float((values.square().sum(-1) * exact_unit.square()).sum()),
        max_error=float((errors.amax(-1) * exact_unit).max()),
    )
    nibbles = (levels.flatten(-2) & 0xF).view(torch.uint8)
    return pack_codes(nibbles), scales, loss


def dequantize_int4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values that the kernel multiplies with: ``bf16(q * scale)``, as float32.

    Args:
        packed: ``[..., K / 2]`` uint8, plain layout.
        scales: ``[..., K / 32]`` bf16.

    Returns:
        ``[..., K]`` float32.
    """
    # Sign extension: shift the nibble to the top of an int8 and back.
    levels = (unpack_codes(packed) << 4).view(torch.int8) >> 4
    grouped: torch.Tensor = levels.float().unflatten(-1, (-1, GROUP_SIZE)) * scales.float().unsqueeze(-1)
    return grouped.to(torch.bfloat16).float().flatten(-2)
