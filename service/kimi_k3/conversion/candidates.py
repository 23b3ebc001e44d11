# SPDX-License-Identifier: Apache-2.0
"""The mathematics of int4_per_group_32, stated once, as tables.

A group's values are ``m * 2^e`` with m one of 15 signed E2M1 values (``e`` is the E8M0 byte less 127), so
everything that concerns a choice of scale can be said in units of ``2^e``. A *candidate* is a positive scale
``c``, a number with at most 8 significant bits, together with the level that represents each magnitude. The
served weight is ``bf16(q * c * 2^e)``: the kernel rounds the product, and that rounding is part of every
error below. Int4 has one level more on the negative side, -8, and the kernel takes a negative scale as well,
so a group can have its *long* side, with levels up to 8, at either tail; the other side is *short*, up to 7.

All errors are multiples of ``2^-fraction_bits``: their squares are integers, a group's squared error is a
small sum of integers, and every implementation that follows these tables (:mod:`reference`, :mod:`cpu`,
:mod:`gpu`) chooses the same candidate and writes the same bits.

Two rules choose among candidates:

* ``amax``: the largest magnitude a of the group becomes level 7, ``c = bf16(a / 7)``. It is bit-identical to
  AITER's ``per_1x32_i4_quant``, the conversion of stock vLLM. That function raises magnitudes below
  ``bf16(1e-6)`` to it; such groups are called *clamped* and have candidates of their own.
* ``mse``: the candidate and sign of least squared error; the first of equals wins.

Why these eight scales for ``mse``. ``benchmarks/candidates.py`` searches sets for the least squared error
against brute force over all bf16 scales of both signs, on Gaussian, Laplace and Student-t (3, 5) weights with
the OCP and the round-up exponent. The best sets of 5, 6, 7, 8, 9 scales lose 2.0, 0.9, 0.6, 0.4, 0.3 %
against it. The set here is the best one of seven, and 1.0: it changes next to nothing on such weights, but
with it and 0.5 a group of few different values, as in sparse or hand-made matrices, is nearly always exact,
and it costs no further table of levels. Sets whose products are exact in bf16 (0.5625, 0.6875, ...) lose 3 to
6 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from kimi_k3.words.weights import Requantisation, ScaleRule

GROUP_SIZE = 32
"""Weights per scale, in MXFP4 and in int4_per_group_32 alike."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the E2M1 codes 0-7; bit 3 of a code is the sign (OCP Microscaling Formats 1.0, section 5.3.3)."""

FOURFOLD_SQUARES = tuple(int(4 * magnitude**2) for magnitude in MAGNITUDES)
"""Whole numbers: a group's energy is a quarter of their sum, times ``4^e``."""

E8M0_BIAS = 127
E8M0_NAN = 255

MSE_SCALES = (0.5, 1.0, 0.5078125, 0.7109375, 0.7421875, 0.76171875, 0.828125, 0.98828125)
"""Candidate scales of the ``mse`` rule; see above."""

NAN_SCALE_BITS = 0xFFFF
INFINITE_SCALE_BITS = 0x7F80
"""bf16 bits that AITER writes for a group whose exponent is NaN, or whose values exceed bf16."""
ZERO_SCALE_BITS = 0x3419
"""bf16 bits of ``1e-6 / 7``: AITER's scale of a group of zeros, and of one too small to be represented."""

NONFINITE_FROM = (255, 255, 255, 255, 254, 254, 253, 253)
"""By the largest code of a group: the first E8M0 byte for which its value ``m * 2^(b - 127)`` is NaN or not
below 2^128, where bf16 ends."""

SHORT_MOST = 7
"""The largest level on the short side."""


@dataclass(frozen=True)
class Candidate:
    """A scale and what it makes of each magnitude, in units of the group's ``2^e``.

    Attributes:
        scale: c > 0.
        long: per code 0-7, the level in 0-8, for the side where -8 can be used.
    """

    scale: float
    long: tuple[int, ...]

    @property
    def short(self) -> tuple[int, ...]:
        """Per code 0-7, the level on the other side."""
        return tuple(min(level, SHORT_MOST) for level in self.long)

    @property
    def short_errors(self) -> tuple[float, ...]:
        """|m - bf16(level * c)| per code, on the short side."""
        return self._errors(self.short)

    @property
    def long_errors(self) -> tuple[float, ...]:
        """The same on the long side."""
        return self._errors(self.long)

    @property
    def bits(self) -> int:
        """bf16 bits of the scale, for e = 0; 128 more for each step of e."""
        mantissa, exponent = math.frexp(self.scale)
        return ((exponent + 126) << 7) + round(mantissa * 256) - 128

    def _errors(self, levels: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(
            abs(value - round_to_bf16(level * self.scale))
            for value, level in zip(MAGNITUDES, levels, strict=True)
        )


@dataclass(frozen=True)
class Option:
    """A candidate with the sign of its scale: what a group can get.

    Attributes:
        candidate: the scale and its levels.
        sign: 1 or -1; with a positive scale the negative codes are on the long side.
    """

    candidate: Candidate
    sign: int

    @property
    def bits(self) -> int:
        """bf16 bits of the signed scale, for e = 0."""
        return self.candidate.bits + (0x8000 if self.sign < 0 else 0)

    @property
    def levels(self) -> tuple[int, ...]:
        """Per code 0-15, the level in -8 to 7."""
        short, long = self.candidate.short, tuple(-level for level in self.candidate.long)
        return short + long if self.sign > 0 else long + short

    @property
    def errors(self) -> tuple[float, ...]:
        """Per code 0-15, what is lost."""
        short, long = self.candidate.short_errors, self.candidate.long_errors
        return short + long if self.sign > 0 else long + short


@dataclass(frozen=True)
class Rule:
    """How a group's scale is chosen.

    Attributes:
        name: ``mse`` or ``amax``.
        candidates: in order of preference. With ``by_error`` all compete. Otherwise the candidate follows
            from the group: that of its largest code k (k - 1), or if it is clamped, that of its E8M0 byte
            (see :attr:`clamped_offset`).
        by_error: whether the least squared error decides.
        signs: the signs a scale may have, in order of preference.
        fraction_bits: errors are multiples of 2 to minus this.
        normal_from: by the largest code, the first E8M0 byte at which a group is not clamped.
        dropped_below: first E8M0 byte at which anything is kept: below, all levels are 0.
    """

    name: str
    candidates: tuple[Candidate, ...]
    by_error: bool
    signs: tuple[int, ...]
    fraction_bits: int
    normal_from: tuple[int, ...]
    dropped_below: int

    @property
    def options(self) -> tuple[Option, ...]:
        """Every candidate with every sign, in order of preference."""
        return tuple(Option(candidate, sign) for candidate in self.candidates for sign in self.signs)

    @property
    def sided_codes(self) -> tuple[int, ...]:
        """The codes of 1-7 whose level is 8 for some candidate, so that it matters which side they are on."""
        return tuple(code for code in range(1, 8) if any(one.long[code] == 8 for one in self.candidates))

    @property
    def clamped_offset(self) -> int:
        """Added to a clamped group's E8M0 byte: the number of its candidate, behind those of the codes."""
        return len(MAGNITUDES) - 1 - self.dropped_below

    def squares(self, errors: tuple[float, ...]) -> tuple[int, ...]:
        """Squared errors as whole numbers of ``2^-(2 * fraction_bits)``."""
        scaled = [error * 2**self.fraction_bits for error in errors]
        assert all(value.is_integer() for value in scaled)
        return tuple(int(value) ** 2 for value in scaled)


def round_to_bf16(value: float) -> float:
    """Round to 8 significant bits, ties to even (the normal range is the caller's business)."""
    if value == 0:
        return 0.0
    mantissa, exponent = math.frexp(value)
    # Python's round() goes to even on ties, and mantissa * 2**8 is exact.
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _nearest(scale: float) -> tuple[int, ...]:
    # Of two levels as near the larger one, so that 1 shares its levels with 0.98828125.
    levels = range(SHORT_MOST + 1, -1, -1)
    return tuple(
        min(levels, key=lambda level: abs(value - round_to_bf16(level * scale))) for value in MAGNITUDES
    )


@cache
def mse_rule(*, negative_scale: bool = True) -> Rule:
    """The rule of least squared error.

    Args:
        negative_scale: whether a scale may be negative; without, the long side is always the negative one.
    """
    return Rule(
        name="mse",
        candidates=tuple(Candidate(scale, _nearest(scale)) for scale in MSE_SCALES),
        by_error=True,
        signs=(1, -1) if negative_scale else (1,),
        # c has 8 significant bits and is at least 1/2.
        fraction_bits=8,
        # Below, a scale would be subnormal in bf16, which the kernel might take for 0. The values are below
        # 1e-36.
        normal_from=(2,) * 8,
        dropped_below=2,
    )


@cache
def amax_rule() -> Rule:
    """AITER's rule. Its input is a bf16 tensor, so each of its steps ends in a rounding to bf16."""
    floor = round_to_bf16(1e-6)
    normal_from = tuple(
        next(b for b in range(256) if value * 2.0 ** (b - E8M0_BIAS) >= floor) if value else 0
        for value in MAGNITUDES
    )
    scale_floor = round_to_bf16(floor / SHORT_MOST)
    # The smallest exponent at which the largest magnitude still reaches half a step of the smallest scale.
    dropped_below = next(b for b in range(256) if MAGNITUDES[-1] * 2.0 ** (b - E8M0_BIAS) > scale_floor / 2)
    scales = [round_to_bf16(value / SHORT_MOST) for value in MAGNITUDES[1:]]
    clamped = [scale_floor * 2.0 ** (E8M0_BIAS - b) for b in range(dropped_below, max(normal_from))]
    levels = [
        tuple(min(SHORT_MOST, round(round_to_bf16(value / scale))) for value in MAGNITUDES)
        for scale in (*scales, *clamped)
    ]
    return Rule(
        name="amax",
        candidates=tuple(
            Candidate(scale, level) for scale, level in zip((*scales, *clamped), levels, strict=True)
        ),
        by_error=False,
        signs=(1,),
        # The smallest scale, bf16(0.5 / 7), is a multiple of 2^-11.
        fraction_bits=11,
        normal_from=normal_from,
        dropped_below=dropped_below,
    )


def rule_of(requantisation: Requantisation) -> Rule:
    """The rule that was asked for."""
    if requantisation.rule is ScaleRule.AMAX:
        return amax_rule()
    return mse_rule(negative_scale=requantisation.negative_scale)
