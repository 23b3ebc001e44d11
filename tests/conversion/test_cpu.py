# SPDX-License-Identifier: Apache-2.0
"""The fast conversion on the host against the one that is written to be read, and against AITER's output."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.conversion import cpu, reference
from kimi_k3.conversion.candidates import Candidate, amax_rule, mse_rule
from kimi_k3.conversion.nonfinite import NonFiniteGroupError
from kimi_k3.words.weights import Int4Layout

from .groups import GOLDEN_NAMES, PUBLISHED_RULES, assert_same_losses, experts, golden

if TYPE_CHECKING:
    import numpy.typing as npt

    Octets = npt.NDArray[np.uint8]

# Unlike the real rules: more codes with a level 8, the negative sign first, clamped groups for which the
# errors decide, and keys that need 64 bits.
CUSTOM = dataclasses.replace(
    mse_rule(),
    name="custom",
    candidates=(
        Candidate(0.25, (0, 2, 4, 6, 8, 8, 8, 8)),
        Candidate(0.75, (0, 1, 2, 2, 2, 4, 5, 8)),
        *mse_rule().candidates[:3],
    ),
    signs=(-1, 1),
    fraction_bits=13,
    normal_from=(5, 5, 5, 4, 4, 3, 3, 3),
)
RULES = {**PUBLISHED_RULES, "custom": CUSTOM}


@pytest.mark.parametrize("layout", Int4Layout)
@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_equals_the_readable_implementation(name: str, layout: Int4Layout, data: st.DataObject) -> None:
    """Whoever converts, the bits and the figures must be those that the tables state."""
    packed, e8m0 = data.draw(experts(layout))
    rule = RULES[name]
    wanted, wanted_scales, wanted_tally = reference.convert(
        torch.from_numpy(packed.copy()), torch.from_numpy(e8m0), rule, layout
    )
    original = packed.copy()
    out = np.empty_like(packed)
    scales, tally = cpu.convert(packed, e8m0, rule, layout, out=out, allow_nonfinite=True, threads=1)
    assert np.array_equal(packed, original)
    assert np.array_equal(out, wanted.numpy())
    assert np.array_equal(scales, wanted_scales.view(torch.uint16).numpy())
    assert_same_losses(tally, wanted_tally, e8m0)

    scales_in_place, tally_in_place = cpu.convert(packed, e8m0, rule, layout, allow_nonfinite=True, threads=3)
    assert np.array_equal(packed, out)
    assert np.array_equal(scales_in_place, scales)
    assert tally_in_place.losses() == tally.losses()


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_amax_is_bit_identical_to_aiter(name: str) -> None:
    """Rule amax promises the very bytes that stock vLLM's conversion puts into memory."""
    arrays = golden(name)
    packed, e8m0 = arrays["mxfp4_packed"], arrays["e8m0"]
    wanted, wanted_scales = arrays["packed_shuffled"], arrays["scale_shuffled_bf16_bits"]
    scales, _ = cpu.convert(packed, e8m0, amax_rule(), Int4Layout.AITER, allow_nonfinite=True)
    assert np.array_equal(packed, wanted)
    assert np.array_equal(scales.ravel(), wanted_scales.ravel())


def test_a_group_that_is_not_finite_stops_the_conversion_before_anything_is_written() -> None:
    """Whoever repairs a damaged group needs to know which it is, and the other weights as they were."""
    packed, e8m0 = np.full((2, 16, 32), 0x21, np.uint8), np.full((2, 16, 2), 253, np.uint8)
    e8m0[1, 7, 1] = 255
    original = packed.copy()
    with pytest.raises(NonFiniteGroupError, match="expert 1, row 7, group 1 is NaN"):
        cpu.convert(packed, e8m0, mse_rule(), Int4Layout.PLAIN)
    assert np.array_equal(packed, original)


def _array(*shape: int) -> Octets:
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("packed", "e8m0", "out", "message"),
    [
        (_array(1, 2, 32), _array(1, 2, 3), None, "must be \\(1, 2, 48\\)"),
        (_array(1, 2, 32), _array(1, 2, 2), _array(1, 2, 48), "got .*\\(1, 2, 48\\)"),
        (_array(2, 32), _array(2, 2), None, "packed must be"),
        (_array(1, 2, 64)[..., ::2], _array(1, 2, 2), None, "packed must be"),
        (_array(1, 2, 32), _array(1, 2, 2).astype(np.int8), None, "e8m0 must be"),
        (_array(1, 2, 32), _array(1, 2, 2), np.zeros((1, 2, 32)), "out must be"),
        (np.frombuffer(bytes(64), np.uint8).reshape(1, 2, 32), _array(1, 2, 2), None, "packed must be writ"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    packed: Octets, e8m0: Octets, out: Octets | None, message: str
) -> None:
    """The kernel checks no bounds: what does not fit would overwrite other memory."""
    with pytest.raises(ValueError, match=message):
        cpu.convert(packed, e8m0, mse_rule(), Int4Layout.PLAIN, out=out)


def test_the_aiter_layout_needs_whole_strips() -> None:
    """A strip of fewer rows would be completed with the next expert's."""
    with pytest.raises(ValueError, match="multiples of 16"):
        cpu.convert(_array(1, 8, 32), _array(1, 8, 2), mse_rule(), Int4Layout.AITER)


@pytest.mark.parametrize("shape", [(0, 16, 2), (1, 0, 2), (1, 16, 0)])
def test_nothing_is_converted_to_nothing(shape: tuple[int, int, int]) -> None:
    """A rank may hold no expert of a layer."""
    scales, tally = cpu.convert(
        _array(*shape[:2], 16 * shape[2]), _array(*shape), mse_rule(), Int4Layout.AITER
    )
    assert scales.size == 0
    assert all(loss.squared_error == 0 for loss in tally.losses())


def test_does_not_import_torch() -> None:
    """A conversion on a host without torch, or before it is loaded, needs only numpy and numba."""
    script = "import sys; import kimi_k3.conversion.cpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
