# SPDX-License-Identifier: Apache-2.0
"""MXFP4 decoding and its requantisation to ``int4_per_group_32``, written for clarity, in numpy.

The engine's converters are checked against this file, so it shares no code with them and takes no
shortcut they take. A served int4 weight is ``bf16(q * s)``: ``q`` in [-8, 7], ``s`` one bf16 scale
per group of 32 along K. That final rounding is part of the value and of every error below.

Why the arithmetic is exact. Relative to the group's power of two ``2 ** (e8m0 - 127)`` an MXFP4 value
is a multiple of 1/2 no larger than 6. A ``mse`` candidate has at most eight significant bits and is at
least 1/2, so it is a multiple of 2**-8, and so is every level ``bf16(q * c)``, none larger than 8.
Every error is therefore a multiple of 2**-8 below 16, its square an integer over 65536 below 2**8, and
the sum over 32 of them needs under 30 bits: int64 and float64 both hold it exactly. The ``amax``
scales reach down to bf16(0.5 / 7), a multiple of 2**-11: six more bits, still far below float64's 53.
Only sums over groups of different exponents round, and ``math.fsum`` makes those independent of order.

Two conventions are part of rule ``mse``. Of two levels equally near a value the one of larger magnitude
wins. And a nonzero group with exponent 0 or 1, whose scale would be subnormal in bfloat16, is dropped:
all its levels are 0, with the scale of a group of zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Rule = Literal["mse", "amax"]
Array = npt.NDArray[Any]

GROUP = 32
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
CANDIDATES = (0.5, 1.0, 0.5078125, 0.7109375, 0.7421875, 0.76171875, 0.828125, 0.98828125)
LEVELS = np.arange(-8, 8)
NORMAL_FROM = 2  # The first exponent with which every candidate is a normal bfloat16 number.

# What AITER's per_1x32_i4_quant writes where no useful scale exists.
EPSILON = np.float32(1e-6)
ZERO_SCALE = np.uint16(0x3419)  # bf16(1e-6 / 7)
INF_SCALE = np.uint16(0x7F80)
NAN_SCALE = np.uint16(0xFFFF)


def to_bf16_bits(values: npt.ArrayLike) -> Array:
    """The uint16 bits of ``values`` (first taken to float32) rounded to bfloat16, ties to even."""
    single = np.asarray(values, dtype=np.float32)
    word = single.view(np.uint32).astype(np.uint64)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    bits: Array = np.where(np.isnan(single), NAN_SCALE, rounded).astype(np.uint16)
    return bits


def from_bf16_bits(bits: Array) -> Array:
    """The float32 value of bfloat16 bits."""
    value: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return value


def round_bf16(values: npt.ArrayLike) -> Array:
    """``values`` rounded to bfloat16, as float32."""
    return from_bf16_bits(to_bf16_bits(values))


def unpack_nibbles(packed: Array) -> Array:
    """The E2M1 codes of ``[..., K / 2]`` bytes as ``[..., K]``: the low nibble is the even column."""
    codes: Array = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return codes


def mxfp4_values(packed: Array, e8m0: Array) -> Array:
    """The exact values, as float64, of MXFP4 codes and their E8M0 exponents (0xFF is NaN)."""
    codes = unpack_nibbles(packed).reshape(*e8m0.shape, GROUP)
    with np.errstate(invalid="ignore"):
        unit = np.where(e8m0 == 255, np.nan, np.ldexp(1.0, e8m0.astype(np.int64) - 127))
        values: Array = (E2M1[codes] * unit[..., None]).reshape(*packed.shape[:-1], -1)
    return values


@dataclass(frozen=True)
class Loss:
    """What requantising one matrix cost, against its MXFP4 values.

    Groups whose MXFP4 values are not finite bfloat16 numbers cannot be served; they are counted in
    ``nonfinite`` and left out of every other figure but ``groups``. Nonzero groups that are too small for a
    scale of their own are counted in ``clamped``: by rule ``amax`` those whose largest magnitude is below
    AITER's epsilon, by rule ``mse`` those that are dropped.
    """

    groups: int
    lossless: int
    zero: int
    nonfinite: int
    clamped: int
    squared_error: float
    energy: float
    max_abs_error: float

    @property
    def relative_mse(self) -> float:
        """Squared error over energy; 0 for a matrix of zeros, which is always reproduced."""
        return self.squared_error / self.energy if self.energy else 0.0


@dataclass(frozen=True)
class Int4:
    """One requantised matrix (leading dimensions allowed)."""

    q: Array  # int8 [..., N, K]
    scale_bits: Array  # uint16 [..., N, K / 32]

    def dequantise(self) -> Array:
        """The served weights: ``bf16(q * s)`` as float32."""
        scale = from_bf16_bits(self.scale_bits)[..., None]
        with np.errstate(invalid="ignore", over="ignore"):
            product = self.q.reshape(*self.scale_bits.shape, GROUP).astype(np.float32) * scale
            return round_bf16(product).reshape(self.q.shape)


def requantise(packed: Array, e8m0: Array, rule: Rule, *, negative_scale: bool = True) -> tuple[Int4, Loss]:
    """Requantise MXFP4 ``packed`` uint8 ``[..., N, K / 2]`` with ``e8m0`` uint8 ``[..., N, K / 32]``.

    Without ``negative_scale`` rule ``mse`` chooses among positive scales only; ``amax`` always does.
    """
    if packed.dtype != np.uint8 or e8m0.dtype != np.uint8:
        raise TypeError(f"MXFP4 codes and exponents are uint8, got {packed.dtype} and {e8m0.dtype}")
    if (*e8m0.shape[:-1], e8m0.shape[-1] * GROUP // 2) != packed.shape:
        raise ValueError(f"{packed.shape} packed bytes do not match {e8m0.shape} groups of {GROUP}")

    codes = unpack_nibbles(packed).reshape(*e8m0.shape, GROUP)
    values = mxfp4_values(packed, e8m0).reshape(codes.shape)
    q, bits = _amax(values) if rule == "amax" else _mse(codes, e8m0, negative_scale)

    peak = np.abs(values).max(axis=-1)
    nan = np.isnan(peak)
    infinite = np.isinf(_round_to_bf16(peak)) & ~nan
    zero = peak == 0
    too_small = peak < round_bf16(EPSILON) if rule == "amax" else e8m0 < NORMAL_FROM
    clamped = too_small & ~zero & ~nan
    dropped = clamped & (rule == "mse")
    bits = np.select([nan, infinite, zero | dropped], [NAN_SCALE, INF_SCALE, ZERO_SCALE], bits)
    q = np.where((nan | infinite | zero | dropped)[..., None], 0, q).astype(np.int8)

    int4 = Int4(q.reshape(*packed.shape[:-1], -1), bits)
    served = int4.dequantise().reshape(codes.shape)
    return int4, _loss(values, served, nan | infinite, zero, clamped)


def _round_to_bf16(values: Array) -> Array:
    """bfloat16 rounding of float64 input that may exceed float32."""
    with np.errstate(over="ignore"):
        return round_bf16(values)


def _amax(values: Array) -> tuple[Array, Array]:
    """AITER's rule. Its input is a bfloat16 tensor, so each of its steps ends in a bfloat16 rounding."""
    weight = _round_to_bf16(values)
    with np.errstate(invalid="ignore"):
        peak = np.maximum(np.abs(weight).max(axis=-1), round_bf16(EPSILON))
        bits = to_bf16_bits(peak / np.float32(7))
        level = np.rint(round_bf16(weight / from_bf16_bits(bits)[..., None]))
    return np.clip(np.nan_to_num(level, nan=0.0), -7, 7).astype(np.int8), bits


def _mse_tables(negative_scale: bool) -> tuple[Array, Array, Array]:
    """Per signed candidate: its value, and per E2M1 code the best level and 65536 times its error squared."""
    signs = (1.0, -1.0) if negative_scale else (1.0,)
    scales = np.array([sign * c for c in CANDIDATES for sign in signs])
    levels = round_bf16(LEVELS * scales[:, None]).astype(np.float64)
    square = np.square((E2M1[None, :, None] - levels[:, None, :]) * 256).astype(np.int64)
    # Sorting the levels by magnitude first, largest first, lets argmin break ties towards the larger one.
    by_magnitude = np.argsort(-np.abs(LEVELS), kind="stable")
    best = by_magnitude[square[..., by_magnitude].argmin(axis=-1)]
    return scales, LEVELS[best].astype(np.int8), np.take_along_axis(square, best[..., None], -1)[..., 0]


def _mse(codes: Array, e8m0: Array, negative_scale: bool) -> tuple[Array, Array]:
    """The candidate of least squared error, chosen relative to the exponent and so alike for all of them.

    (What this gives for exponents 0 and 1, whose scales are not normal, the caller replaces.)
    """
    scales, level, square = _mse_tables(negative_scale)
    counts = np.stack([(codes == code).sum(axis=-1) for code in range(16)], axis=-1)
    choice = (counts @ square.T).argmin(axis=-1)
    with np.errstate(over="ignore"):
        # Exponent 255 overflows here and is replaced by the caller.
        bits = to_bf16_bits(np.ldexp(scales[choice], e8m0.astype(np.int64) - 127))
    return level[choice[..., None], codes], bits


def _loss(values: Array, served: Array, nonfinite: Array, zero: Array, clamped: Array) -> Loss:
    finite = values[~nonfinite]
    error = finite - served[~nonfinite].astype(np.float64)
    return Loss(
        groups=nonfinite.size,
        lossless=int((error == 0).all(axis=-1).sum()),
        zero=int(zero.sum()),
        nonfinite=int(nonfinite.sum()),
        clamped=int(clamped.sum()),
        squared_error=math.fsum(np.square(error).sum(axis=-1).tolist()),
        energy=math.fsum(np.square(finite).sum(axis=-1).tolist()),
        max_abs_error=float(np.abs(error).max(initial=0.0)),
    )
