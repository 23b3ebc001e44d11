# SPDX-License-Identifier: Apache-2.0
"""The int4 reference against AITER's own output, exact arithmetic and published error figures."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from . import int4

DATA = Path(__file__).parent / "data"
RULES: tuple[int4.Rule, ...] = ("amax", "mse")


def pack(codes: int4.Array) -> int4.Array:
    """Codes ``[..., K]`` as bytes ``[..., K / 2]``, even column in the low nibble."""
    packed: int4.Array = (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
    return packed


def random_groups(seed: int, groups: int, exponent: int = 120) -> tuple[int4.Array, int4.Array]:
    """One group per row, every code equally likely."""
    codes = np.random.default_rng(seed).integers(0, 16, (groups, int4.GROUP), dtype=np.uint8)
    return pack(codes), np.full((groups, 1), exponent, np.uint8)


def gaussian_mxfp4(seed: int, groups: int) -> tuple[int4.Array, int4.Array]:
    """Gaussian weights quantised to MXFP4 with the OCP exponent (that of the peak, less 2)."""
    weight = np.random.default_rng(seed).standard_normal((groups, int4.GROUP))
    exponent = np.frexp(np.abs(weight).max(axis=1))[1] - 3
    scaled = np.abs(np.ldexp(weight, -exponent[:, None]))
    codes = np.abs(scaled[..., None] - int4.E2M1[:8]).argmin(axis=-1) | (np.signbit(weight) << 3)
    return pack(codes), (exponent + 127).astype(np.uint8)[:, None]


def group_errors(packed: int4.Array, e8m0: int4.Array, rule: int4.Rule) -> int4.Array:
    """The squared error of each group of a matrix with one group per row."""
    served = int4.requantise(packed, e8m0, rule)[0].dequantise()
    errors: int4.Array = np.square(int4.mxfp4_values(packed, e8m0) - served).sum(axis=-1)
    return errors


def test_e2m1_table() -> None:
    """The sixteen codes are two exponent bits (bias 1, subnormal at 0), one mantissa bit, a sign on top."""
    for code, value in enumerate(int4.E2M1):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        assert value == (-magnitude if sign else magnitude)


def test_nibble_order_and_exponent() -> None:
    """Swapping the nibbles, or an exponent off by one, would still give plausible weights."""
    packed = np.zeros((1, 32), np.uint8)
    packed[0, 0] = 0xF1
    packed[0, 16] = 0x02
    values = int4.mxfp4_values(packed, np.array([[127, 130]], np.uint8))
    assert values[0, 0] == 0.5
    assert values[0, 1] == -6.0
    assert values[0, 32] == 8.0


def test_every_exponent_decodes() -> None:
    """E8M0 spans 2**-127 (subnormal in float32) to 2**127, and 255 is NaN."""
    packed = np.full((256, 16), 0x22, np.uint8)
    values = int4.mxfp4_values(packed, np.arange(256, dtype=np.uint8)[:, None])[:, 0]
    assert values[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert np.isnan(values[255])


def test_bf16_rounding_is_to_nearest_even() -> None:
    """Truncation, or ties away from zero, would pass most comparisons and fail a few per thousand."""
    ulp = 2.0**-7
    values = [1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2.0**-20, -1 - ulp / 2, 3.4e38]
    assert int4.round_bf16(values).tolist() == [1, 1 + 2 * ulp, 1 + ulp, -1, np.inf]


@pytest.mark.parametrize("name", ["amax_small", "amax_all_exponents"])
def test_amax_equals_aiter(name: str) -> None:
    """The rule is defined as what AITER's ``per_1x32_i4_quant`` returned, every exponent included."""
    with np.load(DATA / f"{name}.npz") as golden:
        matrix, loss = int4.requantise(golden["mxfp4_packed"], golden["e8m0"], "amax")
        np.testing.assert_array_equal(matrix.q, golden["int4_values"])
        # AITER stores its scales [E, G, N].
        np.testing.assert_array_equal(matrix.scale_bits, golden["scale_bf16_bits_EGN"].transpose(0, 2, 1))
        assert loss.groups == golden["e8m0"].size


def test_mse_equals_exhaustive_search_in_fractions() -> None:
    """The vectorised tables could share a mistake with their own argument; rationals cannot round."""
    packed, e8m0 = random_groups(1, 40, exponent=127)
    matrix, _ = int4.requantise(packed, e8m0, "mse")
    for row, values in enumerate(int4.mxfp4_values(packed, e8m0)):
        best: tuple[Fraction, float, list[int]] | None = None
        for candidate in int4.CANDIDATES:
            for scale in (candidate, -candidate):
                levels = [(q, Fraction(float(int4.round_bf16(q * scale)))) for q in range(-8, 8)]
                chosen = [min(levels, key=lambda p: (abs(p[1] - Fraction(v)), -abs(p[0]))) for v in values]
                error = sum(
                    ((p[1] - Fraction(v)) ** 2 for p, v in zip(chosen, values, strict=True)), Fraction()
                )
                if best is None or error < best[0]:
                    best = (error, scale, [p[0] for p in chosen])
        assert best is not None
        assert matrix.q[row].tolist() == best[2]
        assert int4.from_bf16_bits(matrix.scale_bits[row]).tolist() == [best[1]]


def test_mse_choice_does_not_depend_on_the_exponent() -> None:
    """Converters choose from the codes alone; that is right because bfloat16 rounding scales."""
    packed, _ = random_groups(2, 200)
    reference, _ = int4.requantise(packed, np.full((200, 1), 127, np.uint8), "mse")
    for exponent in (2, 60, 200, 252):
        matrix, _ = int4.requantise(packed, np.full((200, 1), exponent, np.uint8), "mse")
        np.testing.assert_array_equal(matrix.q, reference.q)
        scale = int4.from_bf16_bits(reference.scale_bits) * np.ldexp(np.float32(1), exponent - 127)
        np.testing.assert_array_equal(int4.from_bf16_bits(matrix.scale_bits), scale)


@pytest.mark.parametrize("sign", [1, -1])
def test_mse_is_lossless_up_to_three_and_one_sided_fours(sign: int) -> None:
    """With scale 1/2 the levels are -4 to 3.5, so only 6 and fours of both signs can cost anything.

    It is the one place where -8 and a negative scale show: a converter that loses either fails here.
    """
    lawful = [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 14 if sign > 0 else 6]
    codes = np.random.default_rng(3).choice(lawful, (500, 32)).astype(np.uint8)
    packed, e8m0 = pack(codes), np.full((500, 1), 120, np.uint8)
    matrix, loss = int4.requantise(packed, e8m0, "mse")
    np.testing.assert_array_equal(matrix.dequantise(), int4.mxfp4_values(packed, e8m0))
    assert loss.lossless == loss.groups == 500
    assert loss.relative_mse == 0
    assert matrix.q.min() == -8
    assert (matrix.scale_bits >> 15).any() == (sign < 0)


def test_mse_beats_amax_but_not_in_every_group() -> None:
    """amax has a scale of its own, peak / 7, outside the candidates, and some groups are made for it.

    They are rare and have a peak of 4 or 6; everywhere else a larger error would be a mistake.
    """
    packed, e8m0 = gaussian_mxfp4(4, 20_000)
    mse, amax = group_errors(packed, e8m0, "mse"), group_errors(packed, e8m0, "amax")
    worse = mse > amax
    peak = np.abs(int4.mxfp4_values(packed, np.full_like(e8m0, 127))).max(axis=-1)
    assert (peak[worse] >= 4).all()
    assert worse.mean() < 0.005
    assert mse.sum() < 0.45 * amax.sum()


@pytest.mark.parametrize(("rule", "relative_mse", "lossless"), [("amax", 0.0103, 0.0), ("mse", 0.0042, 0.17)])
def test_error_on_gaussian_weights(rule: int4.Rule, relative_mse: float, lossless: float) -> None:
    """These are the figures operators are shown; a rule that drifts would still pass parity tests."""
    _, loss = int4.requantise(*gaussian_mxfp4(5, 20_000), rule)
    assert loss.relative_mse == pytest.approx(relative_mse, rel=0.05)
    assert loss.lossless / loss.groups == pytest.approx(lossless, abs=0.03)


@pytest.mark.parametrize("rule", RULES)
def test_groups_of_zeros(rule: int4.Rule) -> None:
    """AITER writes its epsilon's scale there, whatever the exponent and the sign of the zeros."""
    packed = np.array([[0x00] * 16, [0x88] * 16], np.uint8)
    matrix, loss = int4.requantise(packed, np.array([[3], [127]], np.uint8), rule)
    assert matrix.scale_bits.tolist() == [[0x3419], [0x3419]]
    assert not matrix.q.any()
    assert loss == int4.Loss(2, 2, 2, 0, 0, 0.0, 0.0, 0.0)
    assert loss.relative_mse == 0


@pytest.mark.parametrize("rule", RULES)
def test_groups_that_cannot_be_served_are_counted(rule: int4.Rule) -> None:
    """NaN exponents and values beyond bfloat16 must show as such and not poison the other figures."""
    packed = np.array([[0x22] * 16, [0x77] * 16, [0x22] * 16], np.uint8)
    matrix, loss = int4.requantise(packed, np.array([[255], [253], [127]], np.uint8), rule)
    assert matrix.scale_bits[:2].tolist() == [[0xFFFF], [0x7F80]]
    assert not matrix.q[:2].any()
    assert (loss.groups, loss.nonfinite, loss.lossless, loss.energy) == (3, 2, 1, 32.0)


@pytest.mark.parametrize("rule", RULES)
def test_loss_is_measured_on_the_served_values(rule: int4.Rule) -> None:
    """The report must include the bfloat16 rounding of q * s; here it is summed again, element by element."""
    packed, e8m0 = random_groups(6, 64)
    matrix, loss = int4.requantise(packed.reshape(8, 128), e8m0.reshape(8, 8), rule)
    values = int4.mxfp4_values(packed, e8m0).ravel().tolist()
    errors = [v - w for v, w in zip(values, matrix.dequantise().ravel().tolist(), strict=True)]
    assert loss.squared_error == float(sum(Fraction(e) ** 2 for e in errors))
    assert loss.energy == float(sum(Fraction(v) ** 2 for v in values))
    assert loss.max_abs_error == max(abs(e) for e in errors)


def test_wrong_shapes_and_types_are_refused() -> None:
    """A signed or mis-shaped array would decode into plausible nonsense."""
    packed, e8m0 = random_groups(7, 4)
    with pytest.raises(TypeError, match="uint8"):
        int4.requantise(packed.astype(np.int8), e8m0, "mse")
    with pytest.raises(ValueError, match="do not match"):
        int4.requantise(packed, np.repeat(e8m0, 2, axis=1), "mse")
