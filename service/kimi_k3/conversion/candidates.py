# SPDX-License-Identifier: Apache-2.0
"""The mathematics of int4_per_group_32, stated once, as tables.

A group's values are ``m * 2^e`` with m one of 15 signed E2M1 values, so everything that concerns a
choice of scale can be said in units of ``2^e``: a *candidate* is a scale ``c`` (times ``2^e``, one
bf16 number) together with, for each of the 16 codes, the level q in [-8, 7] that represents it and
the error that is left. The kernel multiplies with ``bf16(q * scale)``, so that rounding is part of
the error. All of it is scale-free as long as nothing leaves bf16's normal range
(:data:`EXPONENTS`).

Two rules choose among candidates:

* ``amax``: the largest magnitude a of the group becomes level 7: ``c = bf16(a / 7)``, levels in
  [-7, 7], q the nearest integer to m / c (ties to even). It is bit-identical to AITER's
  ``per_1x32_i4_quant``, the conversion that stock vLLM runs.
* ``mse``: the candidate of least squared error. A negative scale is legal for the kernel and lets
  the extra level -8 serve the positive tail, so every c comes with both signs. The first of equals
  wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kimi_k3.conversion.mxfp4 import MAGNITUDES

MSE_SCALES = (0.5, 1.0, 0.5078125, 0.7109375, 0.7421875, 0.76171875, 0.828125, 0.98828125)
"""Candidate scales of the ``mse`` rule: 0.5 and 1 reproduce many groups exactly; the others were
found by search on Gaussian, heavy-tailed and trained weights, 0.7 % above brute force over all bf16
scales. All have at most 8 significant bits, so ``c * 2^e`` is exact in bf16."""

ZERO_GROUP_SCALE_BITS = 0x3419
"""bf16 bits of the scale that AITER gives to an all-zero group (1e-6 / 7)."""

EXPONENTS = {"mse": range(9, 251), "amax": range(109, 251)}
"""E8M0 bytes for which the tables hold: every ``q * c * 2^e`` is a normal, finite bf16 number, and, for
``amax``, no group is so small that AITER replaces its largest magnitude by 1e-6."""

CODES = MAGNITUDES + tuple(-m for m in MAGNITUDES)
"""Values of the 16 E2M1 codes, in units of the group's power of two."""


@dataclass(frozen=True)
class Candidate:
    """A scale and what it makes of each code, in units of the group's ``2^e``."""

    scale: float
    levels: tuple[int, ...]
    errors: tuple[float, ...]


def round_to_bf16(value: float) -> float:
    """Round to 8 significant bits, ties to even (the normal range is the caller's business)."""
    if value == 0:
        return 0.0
    mantissa, exponent = math.frexp(value)
    # Python's round() goes to even on ties, and mantissa * 2**8 is exact.
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _candidate(scale: float, levels: tuple[int, ...]) -> Candidate:
    return Candidate(
        scale=scale,
        levels=levels,
        errors=tuple(
            abs(code - round_to_bf16(level * scale)) for code, level in zip(CODES, levels, strict=True)
        ),
    )


def _nearest_levels(scale: float) -> tuple[int, ...]:
    by_magnitude = sorted(range(-8, 8), key=abs)
    return tuple(
        min(by_magnitude, key=lambda level: abs(code - round_to_bf16(level * scale))) for code in CODES
    )


def mse_candidates() -> tuple[Candidate, ...]:
    """Candidates of the ``mse`` rule, in order of preference among equals."""
    signed = (sign * scale for scale in MSE_SCALES for sign in (1.0, -1.0))
    return tuple(_candidate(scale, _nearest_levels(scale)) for scale in signed)


def amax_candidates() -> tuple[Candidate, ...]:
    """Candidates of the ``amax`` rule: entry i serves groups whose largest magnitude is code i.

    Entry 0 (all zero) is never multiplied with anything but level 0.
    """
    candidates = [Candidate(scale=1.0, levels=(0,) * 16, errors=(0.0,) * 16)]
    for largest in MAGNITUDES[1:]:
        scale = round_to_bf16(largest / 7)
        levels = tuple(max(-7, min(7, round(code / scale))) for code in CODES)
        candidates.append(_candidate(scale, levels))
    return tuple(candidates)
