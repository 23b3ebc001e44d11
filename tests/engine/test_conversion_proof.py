# SPDX-License-Identifier: Apache-2.0
"""The conversion is compared with its reference where it runs."""

from __future__ import annotations

import pytest
import torch

from kimi_k3.conversion.candidates import Rule, rule_of
from kimi_k3.conversion.experts import convert_experts_
from kimi_k3.engine.conversion_proof import difference
from kimi_k3.words.weights import Int4Layout, Requantisation, ScaleRule

MSE = rule_of(Requantisation(rule=ScaleRule.MSE, negative_scale=True, allow_nonfinite=False))
AMAX = rule_of(Requantisation(rule=ScaleRule.AMAX, negative_scale=False, allow_nonfinite=False))
CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", list(Int4Layout))
@pytest.mark.parametrize("rule", [MSE, AMAX], ids=["mse", "amax"])
def test_the_one_that_serves_is_right(rule: Rule, layout: Int4Layout) -> None:
    """This machine's, which is the one for CPUs."""
    assert difference(convert_experts_, rule, layout, (256, 128), CPU) is None


@pytest.mark.parametrize("what", ["weights", "scales", "layout", "rule"])
def test_a_wrong_one_is_found(what: str) -> None:
    """One flipped bit, another layout, another rule."""

    def convert(
        packed: torch.Tensor, e8m0: torch.Tensor, rule: Rule, layout: Int4Layout
    ) -> tuple[torch.Tensor, object]:
        if what == "layout":
            layout = Int4Layout.PLAIN
        scales, losses = convert_experts_(packed, e8m0, AMAX if what == "rule" else rule, layout)
        if what == "weights":
            packed[0, 3, 5] ^= 1
        if what == "scales":
            scales.view(torch.int16).view(-1)[7] += 1
        if what == "layout":
            scales = scales.view(2, 4, 256, 2)
        return scales, losses

    found = difference(convert, MSE, Int4Layout.AITER, (256,), CPU)
    assert found is not None
    assert "with 256 columns" in found
    assert found.startswith("1 of ") is (what in ("weights", "scales"))
