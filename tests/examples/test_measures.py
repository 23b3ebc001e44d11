# SPDX-License-Identifier: Apache-2.0
"""The figures that the miniature is judged by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from examples.miniature import evaluate
from examples.miniature.divergence import divergence, experts_kept, experts_noted

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.verify.statistics import share_error, wilson
from tests.reference import forward
from tests.reference.forward import ReferenceModel


def test_divergence_is_that_of_the_definition() -> None:
    """Swapped arguments, or another base of the logarithm, would give a plausible number."""
    exact, other = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    expected = 0.9 * torch.tensor(0.9 / 0.5).log() + 0.1 * torch.tensor(0.1 / 0.5).log()
    # A shift of all logits changes no distribution.
    got = divergence(exact.log() + 3, other.log() - 7)
    assert float(got) == pytest.approx(float(expected), rel=1e-6)
    assert float(divergence(exact.log(), exact.log() + 1)) == pytest.approx(0, abs=1e-12)


def test_kept_experts_are_those_of_the_exact_model(tmp_path: Path) -> None:
    """The exact model with its own choices is itself; int4 with them differs from int4 left alone."""
    make_tiny_checkpoint(tmp_path / "tiny")
    exact = ReferenceModel.load(tmp_path / "tiny", weights="mxfp4")
    int4 = ReferenceModel.load(tmp_path / "tiny", weights="int4-amax")
    tokens, route = list(range(65, 105)), forward.route
    choices: list[torch.Tensor] = []
    with experts_noted(choices):
        logits = exact.logits(tokens)
    assert len(choices) == 7
    with experts_kept(choices):
        torch.testing.assert_close(exact.logits(tokens), logits)
    with experts_kept(choices):
        kept = int4.logits(tokens)
    assert forward.route is route
    assert not torch.allclose(kept, int4.logits(tokens), atol=1e-3)


def test_interval_does_not_vanish_at_the_end() -> None:
    """200 of 200 is no proof of 100 %: the normal approximation says so, Wilson's interval does not."""
    assert share_error(200, 200) == 0
    low, high = wilson(200, 200)
    assert low == pytest.approx(0.98116, abs=1e-5)
    assert high == 1.0
    assert share_error(150, 200) == pytest.approx(0.0306186)
    assert evaluate.summary([True, False, True, True])["accuracy"] == 0.75
