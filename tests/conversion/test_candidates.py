# SPDX-License-Identifier: Apache-2.0
"""The rules' tables against torch's rounding, and their choice against all scales that there are."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.conversion import reference
from kimi_k3.conversion.candidates import (
    MAGNITUDES,
    NONFINITE_FROM,
    ZERO_SCALE_BITS,
    Candidate,
    Rule,
    amax_rule,
    mse_rule,
    round_to_bf16,
)
from kimi_k3.words.weights import Int4Layout

from .groups import PUBLISHED_RULES

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

CASES = [pytest.param(rule, id=name) for name, rule in PUBLISHED_RULES.items()]
DISTRIBUTIONS = ("gaussian", "laplace", "student 3", "student 5")
EXPONENTS = ("ocp", "round up")


@given(st.floats(min_value=2.0**-100, max_value=2.0**100), st.sampled_from([1.0, -1.0]))
def test_rounding_equals_torchs(magnitude: float, sign: float) -> None:
    """The tables round in Python what the kernel rounds in hardware."""
    single = torch.tensor(sign * magnitude, dtype=torch.float32)
    assert round_to_bf16(float(single)) == float(single.to(torch.bfloat16))


def test_ties_go_to_even() -> None:
    """Ties are rare among random numbers, but products of a level and a scale are often such."""
    ulp = 2.0**-7
    assert [round_to_bf16(1 + half * ulp / 2) for half in (1, 3, 5)] == [1.0, 1 + 2 * ulp, 1 + 2 * ulp]
    assert round_to_bf16(0.0) == 0.0


def _products(scale: float) -> list[float]:
    """bf16(q * scale) of q = 0 to 8, as the kernel makes them."""
    products: list[float] = (torch.arange(9) * torch.tensor(scale)).to(torch.bfloat16).tolist()
    return products


@pytest.mark.parametrize("rule", CASES)
def test_errors_are_those_of_torchs_products(rule: Rule) -> None:
    """A choice by other errors than the kernel makes would not be the best one, nor the report true."""
    for candidate in rule.candidates:
        products = _products(candidate.scale)
        for levels, errors in (
            (candidate.short, candidate.short_errors),
            (candidate.long, candidate.long_errors),
        ):
            assert errors == tuple(
                abs(m - products[level]) for m, level in zip(MAGNITUDES, levels, strict=True)
            )
            assert rule.squares(errors) == tuple(int((e * 2**rule.fraction_bits) ** 2) for e in errors)


@pytest.mark.parametrize("negative_scale", [True, False])
def test_all_sixteen_codes_get_the_nearest_level(negative_scale: bool) -> None:
    """Given the scale, every weight's error is as small as int4 allows; of two levels as near, the larger."""
    for candidate in mse_rule(negative_scale=negative_scale).candidates:
        products = _products(candidate.scale)
        for levels, most in ((candidate.short, 7), (candidate.long, 8)):
            for magnitude, level in zip(MAGNITUDES, levels, strict=True):
                distance = [abs(magnitude - product) for product in products[: most + 1]]
                assert distance[level] == min(distance)
                assert min(distance) not in distance[level + 1 :]


@pytest.mark.parametrize("rule", CASES)
def test_bits_are_torchs_for_every_exponent(rule: Rule) -> None:
    """Implementations add the exponent to the bits, which is right as long as the scale is normal."""
    tested = 0
    for candidate in rule.candidates:
        for byte in range(rule.dropped_below, min(NONFINITE_FROM)):
            scale = torch.tensor(candidate.scale).double() * 2.0 ** (byte - 127)
            if 2.0**-126 <= scale < 2.0**127:
                bits = scale.float().to(torch.bfloat16).view(torch.int16).item()
                assert bits == candidate.bits + 128 * (byte - 127)
                tested += 1
    assert tested > 150 * len(rule.candidates)


def _choices(rule: Rule, largest: int) -> tuple[Candidate, ...]:
    """Candidates that a group may get; the first that errs with none of its codes is the only one."""
    if not rule.by_error:
        return (rule.candidates[largest - 1],)
    exact = tuple(one for one in rule.candidates if not any(one.short_errors[: largest + 1]))
    return exact[:1] or rule.candidates


@pytest.mark.parametrize("rule", CASES)
def test_a_finite_group_has_a_normal_scale_and_finite_products(rule: Rule) -> None:
    """A scale may not be infinite where the weights are not, nor so small that a kernel takes it for zero."""
    for code in range(1, 8):
        for byte in range(rule.normal_from[code], NONFINITE_FROM[code]):
            for candidate in _choices(rule, code):
                assert 1 <= (candidate.bits + 128 * (byte - 127)) >> 7 <= 254
                assert max(candidate.long[: code + 1]) * candidate.scale * 2.0 ** (byte - 127) < 2.0**128


def test_values_are_finite_up_to_where_the_table_says() -> None:
    """A group that bf16 cannot hold would become infinite, one that it can hold must not be refused."""
    for magnitude, first in zip(MAGNITUDES, NONFINITE_FROM, strict=True):
        for byte in range(250, 255):
            value = torch.tensor(magnitude * 2.0 ** (byte - 127), dtype=torch.float64).to(torch.bfloat16)
            assert value.isfinite() == (byte < first)


def test_clamped_groups_of_amax_have_aiters_smallest_scale() -> None:
    """AITER raises their magnitude to 1e-6, so their scale is the same number whatever their exponent."""
    rule = amax_rule()
    for number, byte in enumerate(range(rule.dropped_below, max(rule.normal_from)), start=7):
        assert rule.candidates[number].bits + 128 * (byte - 127) == ZERO_SCALE_BITS


def test_one_more_scale_costs_no_further_table_of_levels() -> None:
    """1.0 makes groups of few values exact, and is free because it shares its levels with 0.98828125."""
    levels = {candidate.scale: candidate.long for candidate in mse_rule().candidates}
    assert levels[1.0] == levels[0.98828125]


def _groups(distribution: str, exponent: str, count: int) -> tuple[Array, Array]:
    """Groups of weights in MXFP4: codes ``[count, 32]`` and powers of two ``[count]``."""
    random = np.random.default_rng(1)
    weights = {
        "gaussian": lambda: random.standard_normal((count, 32)),
        "laplace": lambda: random.laplace(size=(count, 32)),
        "student 3": lambda: random.standard_t(3, (count, 32)),
        "student 5": lambda: random.standard_t(5, (count, 32)),
    }[distribution]()
    largest = np.abs(weights).max(axis=1, keepdims=True)
    power = np.floor(np.log2(largest)) - 2 if exponent == "ocp" else np.ceil(np.log2(largest / 6))
    nearest = np.abs(np.abs(weights / 2.0**power)[..., None] - MAGNITUDES).argmin(-1)
    return (nearest | np.signbit(weights) << 3).astype(np.uint8), power[:, 0]


@cache
def _squares_of_all_scales() -> Array:
    """``[scale, code]``: least squared error of a code, for all bf16 scales of both signs that may be best.

    With a smaller one than these all levels are nearer to 0 than any value is, with a larger one only 0 is of
    use; so twice or half of it is as good.
    """
    positive = np.array(
        [mantissa * 2.0**exponent for exponent in range(-12, -3) for mantissa in range(128, 256)]
    )
    scales = np.concatenate([positive, -positive])
    products = torch.from_numpy(scales[:, None] * np.arange(-8, 8)).to(torch.bfloat16).double().numpy()
    values = np.concatenate([MAGNITUDES, np.negative(MAGNITUDES)])
    squares: Array = ((values[:, None] - products[:, None, :]) ** 2).min(axis=-1)
    return squares


def _error(codes: Array, power: Array, rule: Rule) -> float:
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)[None]
    e8m0 = torch.from_numpy(power + 127).to(torch.uint8).view(1, -1, 1)
    return float(reference.convert(packed, e8m0, rule, Int4Layout.PLAIN)[2].squared_error.sum())


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_eight_scales_are_nearly_as_good_as_all(distribution: str, exponent: str) -> None:
    """It is why no search over scales is needed, and why mse is worth more than AITER's rule."""
    codes, power = _groups(distribution, exponent, 2000)
    counts = np.stack([(codes == code).sum(axis=1) for code in range(16)], axis=1)
    best = float((4.0**power * (counts @ _squares_of_all_scales().T).min(axis=1)).sum())
    error = _error(codes, power, mse_rule())
    assert best <= error <= 1.05 * best
    assert _error(codes, power, mse_rule(negative_scale=False)) >= 1.1 * best
    assert _error(codes, power, amax_rule()) >= 2.0 * error


def test_scales_have_no_more_bits_than_bf16() -> None:
    """A scale with more than eight significant bits would be another one when it is stored."""
    for rule in PUBLISHED_RULES.values():
        for candidate in rule.candidates:
            assert round_to_bf16(candidate.scale) == candidate.scale
