# SPDX-License-Identifier: Apache-2.0
"""The proof of a kernel: what is right passes, each known mistake is told apart from rounding, and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kimi_k3.engine.proof import (
    TOLERANCE,
    Matrix,
    Problem,
    Proof,
    Situ,
    Size,
    make_problem,
    prove,
    relative_error,
)

K3 = Situ(beta=4.0, linear_beta=25.0)
CPU = torch.device("cpu")
SMALL = Size(hidden=128, intermediate=64, experts=16, top_k=3)
Change = Callable[[Matrix], Matrix]


Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rounded(problem: Problem, activation: Activation) -> torch.Tensor:
    """As a GPU computes it: bf16 between the projections and in the sum over experts."""
    total = torch.zeros_like(problem.hidden)
    for token in range(len(problem.hidden)):
        for slot, expert in enumerate(problem.expert_ids[token].tolist()):
            gate, up = (problem.w13.values(expert) @ problem.hidden[token].float()).chunk(2)
            middle = activation(gate, up).to(torch.bfloat16).float()
            total[token] += (problem.expert_weights[token, slot] * (problem.w2.values(expert) @ middle)).to(
                torch.bfloat16
            )
    return total


def proof(kernel: Callable[[Problem], torch.Tensor], *, signs: bool = True) -> Proof:
    return prove(kernel, SMALL, situ=K3, signs=signs, device=CPU)


def wrong(change: Change, *, w13: bool = True, w2: bool = True) -> Callable[[Problem], torch.Tensor]:
    def kernel(problem: Problem) -> torch.Tensor:
        changed = replace(
            problem,
            w13=change(problem.w13) if w13 else problem.w13,
            w2=change(problem.w2) if w2 else problem.w2,
        )
        return rounded(changed, K3)

    return kernel


def nibbles(matrix: Matrix) -> Matrix:
    return replace(matrix, levels=matrix.levels.unflatten(-1, (-1, 2, 4)).flip(-2).flatten(-3))


def pairs(matrix: Matrix) -> Matrix:
    return replace(matrix, scales=matrix.scales.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


def eight(matrix: Matrix) -> Matrix:
    return replace(matrix, levels=torch.where(matrix.levels == -8, 8, matrix.levels))


def signs(matrix: Matrix) -> Matrix:
    return replace(matrix, scales=matrix.scales.abs())


def test_a_right_kernel_passes() -> None:
    """Rounding is an order of magnitude below the tolerance."""
    found = proof(lambda problem: rounded(problem, K3))
    assert found.right_with_signs
    assert found.likeness is None
    assert found.signed_error is not None
    assert max(found.error, found.signed_error) < TOLERANCE / 3


MISTAKES = [(nibbles, "nibble order"), (pairs, "even and odd groups"), (eight, "-8 is taken for 8")]


@pytest.mark.parametrize(("change", "words"), MISTAKES)
def test_a_mistake_is_found_and_named(change: Change, words: str) -> None:
    """Far beyond the tolerance, so that no rounding hides it and no rounding is taken for it."""
    found = proof(wrong(change))
    assert not found.right
    assert found.error > 5 * TOLERANCE
    assert words in (found.likeness or "")


@pytest.mark.parametrize("projection", ["w13", "w2"])
@pytest.mark.parametrize("change", [change for change, _ in MISTAKES])
def test_a_mistake_in_one_projection_is_found(change: Change, projection: str) -> None:
    """Both stages are kernels of their own."""
    found = proof(wrong(change, w13=projection == "w13", w2=projection == "w2"))
    assert found.error > 3 * TOLERANCE


def test_ignored_signs_are_found_only_with_signs() -> None:
    """That is what a fall-back to scales without signs hangs on."""
    found = proof(wrong(signs))
    assert found.right
    assert not found.right_with_signs
    assert found.signed_error is not None
    assert found.signed_error > 5 * TOLERANCE
    assert "sign of scales" in (found.likeness or "")
    assert proof(wrong(signs), signs=False) == replace(found, signed_error=None, likeness=None)


def test_another_activation_is_found() -> None:
    """AITER before ROCm/aiter#4646 computes SiLU, fluently."""
    found = proof(lambda problem: rounded(problem, lambda gate, up: torch.nn.functional.silu(gate) * up))
    assert found.error > 5 * TOLERANCE
    assert "SiLU" in (found.likeness or "")
    swapped = proof(lambda problem: rounded(problem, lambda gate, up: K3(up, gate)))
    assert "gate and up" in (swapped.likeness or "")


@pytest.mark.parametrize(
    "bounds", [Situ(beta=1e4, linear_beta=25.0), Situ(beta=4.0, linear_beta=1e4)], ids=["beta", "linear"]
)
def test_a_bound_that_is_ignored_is_found(bounds: Situ) -> None:
    """Gates and ups are wide enough for both bounds to matter."""
    assert proof(lambda problem: rounded(problem, bounds)).error > 3 * TOLERANCE


def test_one_wrong_token_is_found() -> None:
    """A wrong tail of a batch must not vanish among right tokens."""

    def kernel(problem: Problem) -> torch.Tensor:
        answer = rounded(problem, K3)
        if len(answer) == 7:
            answer[6] = 0
        return answer

    assert proof(kernel).error == pytest.approx(1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_wrong(value: float) -> None:
    """A comparison with NaN is never true."""
    found = proof(lambda problem: torch.full_like(problem.hidden, value))
    assert not found.right
    assert found.error == math.inf
    assert relative_error(torch.zeros(1, 2), torch.zeros(2, 2)) == math.inf


def test_the_problem_covers_what_it_is_for() -> None:
    """Every level in both halves of a group, both signs, the same numbers every time."""
    problem = make_problem(SMALL, signed=True, device=CPU)
    assert set(problem.w13.levels[..., :16].unique().tolist()) == set(range(-8, 8))
    assert (problem.w2.scales < 0).any()
    assert (problem.w2.scales > 0).any()
    again = make_problem(SMALL, signed=True, device=CPU)
    assert torch.equal(problem.hidden, again.hidden)
    assert not (make_problem(SMALL, signed=False, device=CPU).w13.scales < 0).any()
    with torch.device("meta"):  # as while a model is built
        assert torch.equal(problem.hidden, make_problem(SMALL, signed=True, device=CPU).hidden)
    assert len(problem.w2.scales) == SMALL.used == 7
    assert len({problem.w2.values(expert).sum().item() for expert in range(7)}) == 7, (
        "experts can be told apart"
    )
    assert all(len(set(row)) == len(row) for row in problem.expert_ids.tolist())
