# SPDX-License-Identifier: Apache-2.0
"""The conversion against AITER's own output and against the independent reference in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.conversion import NonFiniteScaleError, convert_experts_, dequantize_int4, dequantize_mxfp4
from kimi_k3.conversion.candidates import EXPONENTS, ZERO_GROUP_SCALE_BITS, round_to_bf16
from kimi_k3.conversion.int4 import ExponentRangeError
from kimi_k3.conversion.mxfp4 import pack_codes, unpack_codes
from tests.reference import int4 as reference

GOLDEN = Path(__file__).parents[1] / "reference" / "data"
RULES: tuple[reference.Rule, ...] = ("mse", "amax")


def _random_experts(
    seed: int, experts: int = 2, rows: int = 16, groups: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (experts, rows, groups * 16), dtype=torch.uint8, generator=generator)
    e8m0 = torch.randint(110, 130, (experts, rows, groups), dtype=torch.uint8, generator=generator)
    packed[0, 0, :16] = 0x80  # zeros of both signs
    return packed, e8m0


@pytest.mark.parametrize("name", ["amax_small", "amax_all_exponents"])
def test_amax_is_bit_identical_to_aiter(name: str) -> None:
    """Rule amax promises the very bits of stock vLLM's conversion, wherever the rule is defined."""
    with np.load(GOLDEN / f"{name}.npz") as golden:
        packed = torch.from_numpy(golden["mxfp4_packed"].view(np.uint8).copy())
        e8m0 = torch.from_numpy(golden["e8m0"].view(np.uint8).copy())
        levels = torch.from_numpy(golden["int4_values"].copy())
        scale_bits = torch.from_numpy(golden["scale_bf16_bits_EGN"].view(np.int16).copy()).transpose(1, 2)
    legal = (e8m0 >= EXPONENTS["amax"].start) & (e8m0 < EXPONENTS["amax"].stop)
    assert legal.sum() > 500
    scales, _ = convert_experts_(
        packed, torch.where(legal, e8m0, torch.tensor(127, dtype=torch.uint8)), "amax"
    )
    converted = ((unpack_codes(packed) << 4).view(torch.int8) >> 4).unflatten(-1, (-1, 32))
    assert torch.equal(scales.view(torch.int16)[legal], scale_bits[legal])
    assert torch.equal(converted[legal], levels.to(torch.int8).view_as(converted)[legal])


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_conversion_equals_the_independent_reference(rule: reference.Rule, seed: int) -> None:
    """Two implementations that share no code agree bit for bit, and on every figure of the loss."""
    packed, e8m0 = _random_experts(seed)
    expected = [reference.requantise(p.numpy(), e.numpy(), rule) for p, e in zip(packed, e8m0, strict=True)]
    scales, loss = convert_experts_(packed, e8m0, rule)
    levels = (unpack_codes(packed) << 4).view(torch.int8) >> 4
    for expert, (int4, _) in enumerate(expected):
        assert np.array_equal(levels[expert].numpy(), int4.q)
        assert np.array_equal(scales[expert].view(torch.int16).numpy().view(np.uint16), int4.scale_bits)
    losses = [expert_loss for _, expert_loss in expected]
    assert loss.groups == sum(item.groups for item in losses)
    assert loss.lossless_groups == sum(item.lossless for item in losses)
    assert loss.squared_error == pytest.approx(sum(item.squared_error for item in losses), rel=1e-12)
    assert loss.energy == pytest.approx(sum(item.energy for item in losses), rel=1e-12)
    assert loss.max_error == max(item.max_abs_error for item in losses)


@pytest.mark.parametrize("rule", RULES)
def test_reported_loss_is_the_loss_of_what_is_served(rule: str) -> None:
    """The report must speak of the values that the kernel multiplies with, not of an idealised q * scale."""
    packed, e8m0 = _random_experts(3)
    before = dequantize_mxfp4(packed, e8m0).double()
    scales, loss = convert_experts_(packed, e8m0, rule)
    error = before - dequantize_int4(packed, scales).double()
    assert loss.squared_error == pytest.approx(float(error.square().sum()), rel=1e-12)
    assert loss.energy == pytest.approx(float(before.square().sum()), rel=1e-12)
    assert loss.max_error == float(error.abs().max())
    assert loss.lossless_groups == int((error.unflatten(-1, (-1, 32)) == 0).all(-1).sum())
    assert loss.zero_groups == int((before.unflatten(-1, (-1, 32)) == 0).all(-1).sum())


def test_weights_are_converted_in_place_and_only_scales_are_new() -> None:
    """A rank's experts fill its memory; a second copy of them would not fit under pure tensor parallelism."""
    packed, e8m0 = _random_experts(4)
    address, size = packed.data_ptr(), packed.nbytes
    scales, _ = convert_experts_(packed, e8m0, "mse")
    assert (packed.data_ptr(), packed.nbytes) == (address, size)
    assert (scales.dtype, scales.shape) == (torch.bfloat16, e8m0.shape)


def test_zero_groups_get_aiters_scale_and_lose_nothing() -> None:
    """AITER gives a group of zeros the scale 1e-6 / 7; dividing by it must not make noise."""
    packed = torch.zeros(1, 16, 16, dtype=torch.uint8)
    e8m0 = torch.zeros(1, 16, 1, dtype=torch.uint8)
    scales, loss = convert_experts_(packed, e8m0, "mse")
    assert scales.view(torch.int16).unique().tolist() == [ZERO_GROUP_SCALE_BITS]
    assert (loss.zero_groups, loss.lossless_groups, loss.squared_error, loss.energy) == (16, 16, 0.0, 0.0)
    assert not dequantize_int4(packed, scales).any()


def test_a_nan_scale_stops_the_conversion_before_anything_is_overwritten() -> None:
    """A damaged group must name itself and leave the other experts' weights as they were."""
    packed, e8m0 = _random_experts(5)
    e8m0[1, 7, 2] = 255
    original = packed.clone()
    with pytest.raises(NonFiniteScaleError, match="expert 1, row 7, group 2"):
        convert_experts_(packed, e8m0, "mse")
    assert torch.equal(packed, original)


@pytest.mark.parametrize(("rule", "exponent"), [("mse", 8), ("mse", 251), ("amax", 108)])
def test_scales_that_bf16_cannot_hold_are_refused(rule: str, exponent: int) -> None:
    """Outside the tables' range the bits would silently differ from the loss that is reported."""
    packed, e8m0 = _random_experts(6)
    e8m0[0, 3, 1] = exponent
    with pytest.raises(ExponentRangeError, match=f"expert 0, row 3, group 1: E8M0 scale {exponent}"):
        convert_experts_(packed, e8m0, rule)


@given(st.binary(min_size=16, max_size=16))
def test_packing_is_the_inverse_of_unpacking(raw: bytes) -> None:
    """Nibble order is a convention shared with the checkpoint: low nibble = even column."""
    packed = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    assert torch.equal(pack_codes(unpack_codes(packed)), packed)
    assert unpack_codes(packed)[0] == packed[0] & 0xF


@given(st.floats(min_value=2.0**-100, max_value=2.0**100), st.sampled_from([1.0, -1.0]))
def test_rounding_equals_torchs(magnitude: float, sign: float) -> None:
    """The tables round in Python what the kernel rounds in hardware."""
    single = torch.tensor(sign * magnitude, dtype=torch.float32)
    assert round_to_bf16(float(single)) == float(single.to(torch.bfloat16))
