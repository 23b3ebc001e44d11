# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel against the readable conversion, in Triton's interpreter and on a GPU if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.conversion import reference
from kimi_k3.conversion.candidates import amax_rule, mse_rule
from kimi_k3.conversion.nonfinite import NonFiniteGroupError
from kimi_k3.words.weights import Int4Layout

from .groups import GOLDEN_NAMES, PUBLISHED_RULES, assert_same_losses, experts, golden, random_experts

pytest.importorskip("triton", reason="the kernel is written in Triton")

from .interpreter import interpreted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kimi_k3.conversion.candidates import Rule

    from .groups import Octets

PLAIN, AITER = Int4Layout.PLAIN, Int4Layout.AITER


@dataclass(frozen=True)
class Engine:
    """Where the kernel runs: the module :mod:`kimi_k3.conversion.gpu`, and the device of its tensors."""

    gpu: Any
    device: str

    def assert_equals_reference(self, packed: Octets, e8m0: Octets, rule: Rule, layout: Int4Layout) -> None:
        """Convert out of place and in place, and compare bytes, scales and what was counted."""
        source, exponents = torch.from_numpy(packed), torch.from_numpy(e8m0)
        wanted, wanted_scales, wanted_tally = reference.convert(source, exponents, rule, layout)
        weights, exponents = source.clone().to(self.device), exponents.to(self.device)
        out = torch.empty_like(weights)
        for target in (out, None):
            scales, tally = self.gpu.convert(
                weights, exponents, rule, layout, out=target, allow_nonfinite=True
            )
            if target is not None:
                assert torch.equal(weights.cpu(), source)
            assert torch.equal((weights if target is None else target).cpu(), wanted)
            assert scales.shape == wanted_scales.shape
            assert torch.equal(scales.cpu().view(torch.uint16), wanted_scales.view(torch.uint16))
            assert_same_losses(tally, wanted_tally, e8m0)


@pytest.fixture(
    scope="module",
    params=[
        "interpreter",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
        ),
    ],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Both ways to run the kernel."""
    if request.param == "cuda":
        from kimi_k3.conversion import gpu

        yield Engine(gpu, "cuda")
        return
    with interpreted() as module:
        yield Engine(module, "cpu")


@pytest.mark.parametrize("name", PUBLISHED_RULES)
@given(layout=st.sampled_from(Int4Layout), data=st.data())
@settings(max_examples=4, deadline=None)
def test_equals_the_readable_implementation(
    engine: Engine, name: str, layout: Int4Layout, data: st.DataObject
) -> None:
    """Whoever converts, the bits and the figures must be those that the tables state."""
    packed, e8m0 = data.draw(experts(layout, strips=True, most=1, most_groups=4))
    engine.assert_equals_reference(packed, e8m0, PUBLISHED_RULES[name], layout)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((1, 16, 12), AITER),  # 6 pairs: two at once, three chunks of a row
        ((1, 16, 32), PLAIN),  # 16 pairs: eight at once
        ((1, 32, 8), AITER),  # two strips at once
        ((2, 48, 2), AITER),  # strips by threes are converted singly, a part never spans two experts
        ((1, 128, 16), AITER),  # eight strips of one part, one after another
    ],
)
def test_every_division_into_programs_is_right(
    engine: Engine, shape: tuple[int, ...], layout: Int4Layout
) -> None:
    """Strides of strips, pairs and rounds differ, and a wrong one shows only where it is not 0 times."""
    engine.assert_equals_reference(*random_experts(2, *shape), mse_rule(), layout)


@pytest.mark.parametrize("name", ["mse", "amax"])
def test_every_exponent_is_right(engine: Engine, name: str) -> None:
    """Scales, and the powers of two in the sums, are put together from bits."""
    packed, _ = random_experts(3, 1, 64, 16)
    packed.reshape(64, 4, 4, 16)[:, :, 0] = np.arange(4, 8, dtype=np.uint8)[
        :, None
    ]  # a largest magnitude of each
    e8m0 = np.arange(256, dtype=np.uint8).reshape(1, 64, 4).repeat(4, axis=2)
    engine.assert_equals_reference(packed, e8m0, PUBLISHED_RULES[name], PLAIN)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_amax_is_bit_identical_to_aiter(engine: Engine, name: str) -> None:
    """Rule amax promises the very bytes that stock vLLM's conversion puts into memory."""
    arrays = golden(name)
    weights = torch.from_numpy(arrays["mxfp4_packed"]).to(engine.device)
    e8m0 = torch.from_numpy(arrays["e8m0"]).to(engine.device)
    scales, _ = engine.gpu.convert(weights, e8m0, amax_rule(), AITER, allow_nonfinite=True)
    assert np.array_equal(weights.cpu().numpy(), arrays["packed_shuffled"])
    bits = scales.cpu().view(torch.uint16).numpy()
    assert np.array_equal(bits.ravel(), arrays["scale_shuffled_bf16_bits"])


@pytest.mark.parametrize("name", ["mse", "amax"])
def test_parts_with_unusual_groups_are_converted_like_the_others(engine: Engine, name: str) -> None:
    """Such parts take a second launch, which must neither miss one nor convert another one twice."""
    packed, e8m0 = random_experts(4, 1, 48, 4)
    packed[0, 20, :16] = 0x80  # zeros are ordinary
    e8m0[0, 3, 3], e8m0[0, 40, 0], e8m0[0, 41, 1] = 1, 255, 106
    engine.assert_equals_reference(packed, e8m0, PUBLISHED_RULES[name], AITER)


@pytest.mark.parametrize(("exponent", "what"), [(255, "is NaN"), (254, "exceeds bf16")])
def test_a_group_that_is_not_finite_is_named_and_its_part_left_as_it_was(
    engine: Engine, exponent: int, what: str
) -> None:
    """Whoever repairs a damaged group needs to know which it is, and to find it as it was."""
    packed, e8m0 = random_experts(5, 2, 48, 4)
    packed[1, 39, 32:48] = 0x77
    e8m0[1, 39, 2] = exponent
    e8m0[0, 5, 1] = 1  # unusual, yet finite
    weights = torch.from_numpy(packed.copy()).to(engine.device)
    exponents = torch.from_numpy(e8m0).to(engine.device)
    with pytest.raises(NonFiniteGroupError, match=f"expert 1, row 39, group 2 {what}") as caught:
        engine.gpu.convert(weights, exponents, mse_rule(), AITER)
    assert (caught.value.expert, caught.value.row, caught.value.group) == (1, 39, 2)
    rows = engine.gpu.Shape.of(48, 4).rows
    first = 39 // rows * rows
    assert np.array_equal(weights[1, first : first + rows].cpu().numpy(), packed[1, first : first + rows])


def test_rows_too_long_for_registers_go_by_expert(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, a program keeps all its words; more than its registers hold would go to slow memory."""
    assert not engine.gpu.Shape.of(16, 34).fits_registers
    # So long a row takes the interpreter long, too.
    monkeypatch.setattr(engine.gpu, "_KEPT_WORDS_MOST", 4)
    assert not engine.gpu.Shape.of(16, 6).fits_registers
    packed, e8m0 = random_experts(6, 2, 16, 6)
    engine.assert_equals_reference(packed, e8m0, mse_rule(), AITER)
    e8m0[1, 3, 2] = 255
    weights, exponents = (torch.from_numpy(array.copy()).to(engine.device) for array in (packed, e8m0))
    with pytest.raises(NonFiniteGroupError, match="expert 1, row 3, group 2 is NaN"):
        engine.gpu.convert(weights, exponents, mse_rule(), AITER)
    assert np.array_equal(weights[1].cpu().numpy(), packed[1])


def test_shapes_without_whole_strips_are_converted_in_the_plain_layout(engine: Engine) -> None:
    """The kernel has no bounds; other shapes take the readable implementation."""
    packed, e8m0 = random_experts(7, 2, 5, 3)
    engine.assert_equals_reference(packed, e8m0, mse_rule(), PLAIN)
    weights, exponents = (torch.from_numpy(array.copy()).to(engine.device) for array in (packed, e8m0))
    with pytest.raises(ValueError, match="multiples of 16"):
        engine.gpu.convert(weights, exponents, mse_rule(), AITER)
    exponents[1, 4, 2] = 255
    with pytest.raises(NonFiniteGroupError, match="expert 1, row 4, group 2 is NaN"):
        engine.gpu.convert(weights, exponents, mse_rule(), PLAIN)
    assert np.array_equal(weights.cpu().numpy(), packed)


def test_rows_with_more_groups_than_a_thread_can_count_are_converted(engine: Engine) -> None:
    """A count that overflows would turn lossless groups into zeros, or hide groups that are not finite."""
    packed, e8m0 = random_experts(8, 1, 16, 514)
    engine.assert_equals_reference(packed, e8m0, mse_rule(), AITER)


def test_tensors_that_do_not_fit_are_refused(engine: Engine) -> None:
    """The kernel checks no bounds: what does not fit would overwrite other memory."""
    weights, e8m0 = (torch.zeros(1, 16, size, dtype=torch.uint8) for size in (64, 4))
    for bad in ((weights.view(torch.int8), e8m0), (weights, e8m0.mT), (weights.mT, e8m0)):
        with pytest.raises(ValueError, match="contiguous uint8"):
            engine.gpu.convert(*bad, mse_rule(), PLAIN)
    for bad in ((weights[..., :48].contiguous(), e8m0), (weights[0], e8m0[0]), (weights, e8m0[:, :8])):
        with pytest.raises(ValueError, match="do not belong"):
            engine.gpu.convert(*bad, mse_rule(), PLAIN)
    with pytest.raises(ValueError, match="do not belong"):
        engine.gpu.convert(weights, e8m0, mse_rule(), PLAIN, out=weights[:, :8].contiguous())
