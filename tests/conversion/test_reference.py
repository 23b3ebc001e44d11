# SPDX-License-Identifier: Apache-2.0
"""The readable conversion against AITER's own output and against the independent statement in numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.conversion import reference
from kimi_k3.conversion.candidates import Candidate, Rule, amax_rule, mse_rule, rule_of
from kimi_k3.conversion.layout import restore_levels, restore_scales
from kimi_k3.conversion.loss import Loss, total
from kimi_k3.conversion.mxfp4 import dequantize_int4, dequantize_mxfp4, pack_nibbles, unpack_nibbles
from kimi_k3.words.weights import Int4Layout, Requantisation, ScaleRule
from tests.reference import int4

from .groups import GOLDEN_NAMES, PUBLISHED_RULES, experts, golden, random_experts

if TYPE_CHECKING:
    from .groups import Octets

PLAIN, AITER = Int4Layout.PLAIN, Int4Layout.AITER


def _levels(nibbles: torch.Tensor, layout: Int4Layout) -> torch.Tensor:
    """Signed levels of converted bytes, ``[E, N, K]``."""
    return (restore_levels(unpack_nibbles(nibbles), layout) << 4).view(torch.int8) >> 4


def _assert_equals_statement(name: str, layout: Int4Layout, packed: Octets, e8m0: Octets) -> None:
    rule = PUBLISHED_RULES[name]
    nibbles, scales, tally = reference.convert(torch.from_numpy(packed), torch.from_numpy(e8m0), rule, layout)
    levels, scales = _levels(nibbles, layout).numpy(), restore_scales(scales, layout)
    for expert, loss in enumerate(tally.losses()):
        matrix, wanted = int4.requantise(
            packed[expert],
            e8m0[expert],
            "amax" if name == "amax" else "mse",
            negative_scale=name != "positive",
        )
        assert np.array_equal(levels[expert], matrix.q)
        assert np.array_equal(scales[expert].contiguous().view(torch.uint16).numpy(), matrix.scale_bits)
        # A row's sum rounds where its exponents are far apart, the statement sums all groups correctly.
        assert loss.squared_error == pytest.approx(wanted.squared_error, rel=1e-12, abs=0)
        assert loss.energy == pytest.approx(wanted.energy, rel=1e-12, abs=0)
        assert loss == Loss(
            groups=wanted.groups,
            lossless_groups=wanted.lossless,
            zero_groups=wanted.zero,
            nonfinite_groups=wanted.nonfinite,
            clamped_groups=wanted.clamped,
            squared_error=loss.squared_error,
            energy=loss.energy,
            max_error=wanted.max_abs_error,
        )


@pytest.mark.parametrize("layout", Int4Layout)
@pytest.mark.parametrize("name", PUBLISHED_RULES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_equals_the_independent_statement(name: str, layout: Int4Layout, data: st.DataObject) -> None:
    """Two implementations that share no code agree bit for bit, and on every figure of the loss."""
    _assert_equals_statement(name, layout, *data.draw(experts(layout)))


@pytest.mark.parametrize("name", PUBLISHED_RULES)
def test_equals_the_independent_statement_for_every_exponent(name: str) -> None:
    """Both ends of bf16's range, and amax's floor in between, have rules of their own."""
    packed, _ = random_experts(1, 2, 256, 9)
    # Per exponent: groups of one magnitude each, whose limits differ, and random ones.
    packed[0].reshape(256, 9, 16)[:, :8] = np.arange(8, dtype=np.uint8)[None, :, None]
    e8m0 = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (2, 256, 9)).copy()
    _assert_equals_statement(name, PLAIN, packed, e8m0)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_amax_is_bit_identical_to_aiter(name: str) -> None:
    """Rule amax promises the very bits of stock vLLM's conversion, in either layout."""
    arrays = golden(name)
    packed, e8m0 = torch.from_numpy(arrays["mxfp4_packed"]), torch.from_numpy(arrays["e8m0"])
    nibbles, scales, _ = reference.convert(packed, e8m0, amax_rule(), PLAIN)
    assert np.array_equal(_levels(nibbles, PLAIN).numpy(), arrays["int4_values"])
    # AITER writes its scales [E, G, N] first.
    assert np.array_equal(scales.view(torch.uint16).numpy(), arrays["scale_bf16_bits_EGN"].transpose(0, 2, 1))
    nibbles, scales, _ = reference.convert(packed, e8m0, amax_rule(), AITER)
    assert np.array_equal(nibbles.numpy(), arrays["packed_shuffled"])
    assert np.array_equal(scales.view(torch.uint16).numpy().ravel(), arrays["scale_shuffled_bf16_bits"])


@pytest.mark.parametrize("layout", Int4Layout)
@pytest.mark.parametrize("name", PUBLISHED_RULES)
def test_reported_loss_is_the_loss_of_what_is_served(name: str, layout: Int4Layout) -> None:
    """The report must speak of the values that the kernel multiplies with, not of an idealised q * scale."""
    packed, e8m0 = map(torch.from_numpy, random_experts(3, 2, 16, 4))
    packed[0, 0, :16] = 0x80  # zeros of both signs
    nibbles, scales, tally = reference.convert(packed, e8m0, PUBLISHED_RULES[name], layout)
    plain = pack_nibbles(restore_levels(unpack_nibbles(nibbles), layout))
    before = dequantize_mxfp4(packed, e8m0).double()
    error = before - dequantize_int4(plain, restore_scales(scales, layout)).double()
    assert total(tally.losses()) == Loss(
        groups=e8m0.numel(),
        lossless_groups=int((error.unflatten(-1, (-1, 32)) == 0).all(-1).sum()),
        zero_groups=1,
        squared_error=math.fsum(error.square().flatten().tolist()),
        energy=math.fsum(before.square().flatten().tolist()),
        max_error=float(error.abs().max()),
    )


def test_what_is_too_small_for_a_normal_scale_is_dropped_and_counted() -> None:
    """A kernel may flush subnormal scales to zero, so what it would then serve must be what is reported."""
    packed = torch.full((1, 3, 16), 0x21, dtype=torch.uint8)
    e8m0 = torch.tensor([[[0], [1], [2]]], dtype=torch.uint8)
    nibbles, scales, tally = reference.convert(packed, e8m0, mse_rule(), PLAIN)
    assert not nibbles[0, :2].any()
    assert nibbles[0, 2].any()
    assert scales.view(torch.uint16).flatten().tolist() == [0x3419, 0x3419, 0x0080]
    loss = total(tally.losses())
    assert (loss.clamped_groups, loss.lossless_groups, loss.max_error) == (2, 1, 2.0**-126)


def test_of_equal_errors_the_first_candidate_and_sign_win() -> None:
    """Implementations write the same bits only if ties, too, are decided by the tables' order."""
    # Both reproduce a group of ones exactly, with either sign.
    one, half = Candidate(1.0, (0, 0, 1, 2, 2, 3, 4, 6)), Candidate(0.5, (0, 1, 2, 3, 4, 6, 8, 8))
    rule = Rule(
        name="tied",
        candidates=(one, half),
        by_error=True,
        signs=(-1, 1),
        fraction_bits=8,
        normal_from=(2,) * 8,
        dropped_below=2,
    )
    packed = torch.full((1, 1, 16), 0x22, dtype=torch.uint8)
    _, scales, _ = reference.convert(packed, torch.full((1, 1, 1), 127, dtype=torch.uint8), rule, PLAIN)
    assert scales.item() == -1.0


@pytest.mark.parametrize("allow_nonfinite", [False, True])
def test_what_was_asked_is_a_rule(allow_nonfinite: bool) -> None:
    """Engine, report and files must mean the same by the same words."""

    def rule(name: ScaleRule, negative_scale: bool) -> Rule:
        return rule_of(
            Requantisation(rule=name, negative_scale=negative_scale, allow_nonfinite=allow_nonfinite)
        )

    assert rule(ScaleRule.AMAX, False) == amax_rule()
    assert rule(ScaleRule.MSE, True) == mse_rule()
    assert rule(ScaleRule.MSE, False) == mse_rule(negative_scale=False)
