# SPDX-License-Identifier: Apache-2.0
"""The baseline of the benchmark: it must do what stock vLLM does, or a comparison with it means nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import upstream
from kimi_k3.conversion import reference
from kimi_k3.conversion.candidates import amax_rule
from kimi_k3.words.weights import Int4Layout
from tests.conversion.groups import GOLDEN_NAMES, golden, random_experts


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_its_bytes_are_aiters(name: str) -> None:
    """The sequence of passes is written anew here; only its output shows that none was left out."""
    arrays = golden(name)
    packed, e8m0 = torch.from_numpy(arrays["mxfp4_packed"]), torch.from_numpy(arrays["e8m0"])
    nibbles, scales = upstream.convert([packed, e8m0])
    assert np.array_equal(nibbles.numpy(), arrays["packed_shuffled"])
    assert np.array_equal(scales.view(torch.uint16).numpy(), arrays["scale_shuffled_bf16_bits"])
    assert np.array_equal(packed.numpy(), arrays["mxfp4_packed"])


@pytest.mark.parametrize("exponents", [(96, 112), (118, 126)])
def test_the_rule_that_is_compared_with_it_makes_the_same_bytes(exponents: tuple[int, int]) -> None:
    """Both sides of the comparison must do the same work, also where one chunk of experts ends."""
    experts = upstream.CHUNK_EXPERTS + 1
    packed, e8m0 = map(torch.from_numpy, random_experts(1, experts, 32, 6, exponents=exponents))
    nibbles, scales = upstream.convert([packed, e8m0])
    wanted, wanted_scales, _ = reference.convert(packed, e8m0, amax_rule(), Int4Layout.AITER)
    assert torch.equal(nibbles, wanted)
    assert torch.equal(scales.view(torch.uint16), wanted_scales.flatten().view(torch.uint16))
