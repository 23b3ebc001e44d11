# SPDX-License-Identifier: Apache-2.0
"""Proving the experts' kernel right before it serves: a few experts, a few tokens, against float32.

The layer has its real sizes, experts and experts per token, since AITER chooses its kernels by them; tokens
go to a few of the experts.

A kernel that takes nibbles, scales or the activation for something else answers fluently and wrongly. The
problem is made so that each known mistake changes the answer far more than rounding does: levels from -8 to
7, scales that differ between the even and the odd group of a pair and (in a second problem) have both signs,
gates as wide as SiTU's bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kimi_k3.conversion.candidates import GROUP_SIZE
from kimi_k3.conversion.layout import arrange_levels, arrange_scales
from kimi_k3.conversion.mxfp4 import pack_nibbles
from kimi_k3.words.weights import Int4Layout

TOKENS = (1, 4, 7, 16, 32)
"""Batches: those of the kernel's authors (vllm-project/vllm#51274)."""

PREFILL = 1024
"""A batch for which kernels have other tiles; only where computing is quick."""

DISTINCT = 4
"""Experts that are made of random numbers; the others have their levels and other scales."""

SPARE = 4
"""Experts beyond those of one token, so that tokens differ in theirs."""

TOLERANCE = 0.03
"""Largest relative error (root of squared differences over squared values) of one token. Rounding of
activations and sums to bf16 makes about 0.004, the smallest known mistake 0.6 (tests/engine/
test_proof.py)."""

_LEVEL_SPREAD = 4.61
"""Standard deviation of whole numbers that are uniform from -8 to 7."""

_GATE_SPREAD, _UP_SPREAD, _DOWN_SPREAD = 4.0, 20.0, 1.0
"""Standard deviations of the projections' outputs, so that SiTU's two bounds, 4 and 25, matter."""

_ODD_GROUPS = 3.0
"""How much larger the scale of a pair's odd group is."""


@dataclass(frozen=True)
class Matrix:
    """int4 weights of all experts.

    Attributes:
        levels: ``[E, N, K]`` int8, from -8 to 7.
        scales: ``[E, N, K / 32]`` bf16.
    """

    levels: torch.Tensor
    scales: torch.Tensor

    def packed(self, layout: Int4Layout) -> torch.Tensor:
        """``[E, N, K / 2]`` uint8."""
        return pack_nibbles(arrange_levels((self.levels & 0xF).to(torch.uint8), layout)).contiguous()

    def arranged_scales(self, layout: Int4Layout) -> torch.Tensor:
        """In the layout's order and shape."""
        return arrange_scales(self.scales, layout).contiguous()

    def values(self, expert: int) -> torch.Tensor:
        """``[N, K]`` float32 of one expert: what the kernel multiplies with, ``bf16(level * scale)``."""
        levels, scales = self.levels[expert].float(), self.scales[expert].float()
        grouped = levels.unflatten(-1, (-1, GROUP_SIZE)) * scales.unsqueeze(-1)
        values: torch.Tensor = grouped.to(torch.bfloat16).float().flatten(-2)
        return values


@dataclass(frozen=True)
class Situ:
    """The activation: ``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``."""

    beta: float
    linear_beta: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Of float32 tensors of one shape."""
        bounded = self.linear_beta * torch.tanh(up / self.linear_beta)
        situ: torch.Tensor = self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate) * bounded
        return situ


@dataclass(frozen=True)
class Size:
    """A layer on one rank, as the kernels will be asked for it.

    Attributes:
        hidden: ``K``.
        intermediate: ``I``.
        experts: of the rank.
        top_k: experts of a token.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int

    @property
    def used(self) -> int:
        """Experts that the problem has tokens for, the first of the rank."""
        return min(self.experts, self.top_k + SPARE)


@dataclass(frozen=True)
class Problem:
    """Experts and the tokens that go through them.

    Attributes:
        w13: gate rows, then as many up rows; ``[E, 2 I, K]``.
        w2: ``[E, K, I]``.
        hidden: ``[T, K]`` bf16.
        expert_ids: ``[T, top_k]`` int32, different ones for each token.
        expert_weights: ``[T, top_k]`` float32.
    """

    w13: Matrix
    w2: Matrix
    hidden: torch.Tensor
    expert_ids: torch.Tensor
    expert_weights: torch.Tensor

    def tokens(self, count: int) -> Problem:
        """The same with the first tokens only."""
        return replace(
            self,
            hidden=self.hidden[:count],
            expert_ids=self.expert_ids[:count],
            expert_weights=self.expert_weights[:count],
        )

    def answer(self, activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``[T, K]`` float32: the sum of each token's experts, weighted."""
        hidden = self.hidden.float()
        total = torch.zeros_like(hidden)
        for expert in self.expert_ids.unique().tolist():
            chosen, slots = (self.expert_ids == expert).nonzero(as_tuple=True)
            gate, up = (hidden[chosen] @ self.w13.values(expert).T).chunk(2, dim=-1)
            out = activation(gate, up) @ self.w2.values(expert).T
            total.index_add_(0, chosen, out * self.expert_weights[chosen, slots].unsqueeze(-1))
        return total


Kernel = Callable[[Problem], torch.Tensor]
"""What is proved: ``[T, K]`` of a problem, computed as serving computes it."""


@dataclass(frozen=True)
class Proof:
    """What was found.

    Attributes:
        error: the largest relative error of a token with scales that are not negative; infinite if the
            answer is no number.
        signed_error: the same with scales of both signs; ``None`` if nobody asked.
        likeness: the known mistake that the wrong answer looks like, in words; ``None`` if there is none.
    """

    error: float
    signed_error: float | None
    likeness: str | None

    @property
    def right(self) -> bool:
        """Whether the kernel may serve at all."""
        return self.error <= TOLERANCE

    @property
    def right_with_signs(self) -> bool:
        """Whether it may serve scales of both signs."""
        return self.right and self.signed_error is not None and self.signed_error <= TOLERANCE


def prove(
    kernel: Kernel,
    size: Size,
    *,
    situ: Situ,
    signs: bool,
    device: torch.device,
    batches: Sequence[int] = TOKENS,
) -> Proof:
    """Compare a kernel with float32.

    Args:
        kernel: what will serve.
        size: of the layers that it will serve.
        situ: the model's activation.
        signs: whether negative scales are wanted.
        device: where the kernel computes.
        batches: numbers of tokens.
    """
    plain = make_problem(size, signed=False, device=device, tokens=max(batches))
    error, likeness = _compare(kernel, plain, situ, batches)
    if error > TOLERANCE or not signs:
        return Proof(error, None, likeness)
    signed = make_problem(size, signed=True, device=device, tokens=max(batches))
    signed_error, likeness = _compare(kernel, signed, situ, batches)
    return Proof(error, signed_error, likeness)


def make_problem(size: Size, *, signed: bool, device: torch.device, tokens: int = max(TOKENS)) -> Problem:
    """The same problem every time, from a generator of its own."""
    random = _Numbers(20_261_130 + signed)
    gate, up = (
        _matrix(size.intermediate, size.hidden, spread, signed=signed, random=random)
        for spread in (_GATE_SPREAD, _UP_SPREAD)
    )
    w13 = Matrix(torch.cat((gate.levels, up.levels), dim=1), torch.cat((gate.scales, up.scales), dim=1))
    w2 = _matrix(size.hidden, size.intermediate, _DOWN_SPREAD, signed=signed, random=random)
    ids = torch.stack([random.order(size.used)[: size.top_k] for _ in range(tokens)])
    weights = random.uniform(tokens, size.top_k)
    return Problem(
        w13=_repeated(w13, size.used, device),
        w2=_repeated(w2, size.used, device),
        hidden=random.normal(tokens, size.hidden).to(device, torch.bfloat16),
        expert_ids=ids.to(device, torch.int32),
        expert_weights=(weights / weights.sum(dim=-1, keepdim=True)).to(device),
    )


def _repeated(distinct: Matrix, experts: int, device: torch.device) -> Matrix:
    """So many experts, all of them different: their scales grow from one to the next."""
    which = torch.arange(experts, device=device) % DISTINCT
    factors = 1 + torch.arange(experts, device=device, dtype=torch.float32) / (2 * experts)
    scales = distinct.scales.to(device)[which].float() * factors.view(-1, 1, 1)
    return Matrix(distinct.levels.to(device)[which], scales.to(torch.bfloat16))


class _Numbers:
    """Random numbers of a seed, on the CPU and in float32 whatever torch's defaults are at the moment."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def uniform(self, *shape: int) -> torch.Tensor:
        """From 0.5 to 1.5."""
        return torch.rand(shape, generator=self._generator, device="cpu", dtype=torch.float32) + 0.5

    def normal(self, *shape: int) -> torch.Tensor:
        """With standard deviation 1."""
        return torch.randn(shape, generator=self._generator, device="cpu", dtype=torch.float32)

    def whole(self, first: int, end: int, *shape: int) -> torch.Tensor:
        """Whole numbers."""
        return torch.randint(first, end, shape, generator=self._generator, device="cpu", dtype=torch.int8)

    def order(self, count: int) -> torch.Tensor:
        """Of ``count`` things."""
        return torch.randperm(count, generator=self._generator, device="cpu")


def _matrix(rows: int, columns: int, spread: float, *, signed: bool, random: _Numbers) -> Matrix:
    """Levels from -8 to 7, and scales with which a standard normal input gives outputs so wide."""
    levels = random.whole(-8, 8, DISTINCT, rows, columns)
    scales = random.uniform(DISTINCT, rows, columns // GROUP_SIZE)
    scales[..., 1::2] *= _ODD_GROUPS
    scales *= spread / (_LEVEL_SPREAD * math.sqrt(columns) * float(scales.square().mean().sqrt()))
    if signed:
        scales *= random.whole(0, 2, *scales.shape) * 2 - 1
    return Matrix(levels, scales.to(torch.bfloat16))


def _compare(
    kernel: Kernel, problem: Problem, situ: Situ, batches: Sequence[int]
) -> tuple[float, str | None]:
    """The largest error over all batches, and what the first wrong answer looks like."""
    worst, likeness = 0.0, None
    for count in batches:
        part = problem.tokens(count)
        found = kernel(part)
        error = relative_error(found, part.answer(situ))
        if error > TOLERANCE and likeness is None:
            likeness = _likeness(found, part, situ)
        worst = max(worst, error)
    return worst, likeness


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the worst token: ``|found - expected| / |expected|``, infinite if a value is no number."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return math.inf
    difference = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(difference.max())


def _likeness(found: torch.Tensor, problem: Problem, situ: Situ) -> str | None:
    for what, answer in _mistakes(problem, situ):
        if relative_error(found, answer) <= TOLERANCE:
            return what
    return None


def _mistakes(problem: Problem, situ: Situ) -> Iterator[tuple[str, torch.Tensor]]:
    """Known ways to be wrong, and what they answer."""

    def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    def with_matrices(change: Callable[[Matrix], Matrix]) -> Problem:
        return replace(problem, w13=change(problem.w13), w2=change(problem.w2))

    def nibbles(matrix: Matrix) -> Matrix:
        runs = matrix.levels.unflatten(-1, (-1, 2, 4))
        return replace(matrix, levels=runs.flip(-2).flatten(-3))

    def neighbours(matrix: Matrix) -> Matrix:
        return replace(matrix, levels=matrix.levels.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))

    def pairs(matrix: Matrix) -> Matrix:
        if matrix.scales.shape[-1] % 2:
            return matrix
        return replace(matrix, scales=matrix.scales.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))

    def unsigned_eight(matrix: Matrix) -> Matrix:
        return replace(matrix, levels=torch.where(matrix.levels == -8, 8, matrix.levels))

    def no_signs(matrix: Matrix) -> Matrix:
        return replace(matrix, scales=matrix.scales.abs())

    yield "SiLU is computed instead of SiTU", problem.answer(silu)
    yield "gate and up are taken for each other", problem.answer(lambda gate, up: situ(up, gate))
    for what, change in (
        ("the halves of each run of eight weights are swapped (nibble order)", nibbles),
        ("neighbouring weights are swapped (nibble order)", neighbours),
        ("the scales of even and odd groups are swapped", pairs),
        ("the level -8 is taken for 8", unsigned_eight),
        ("the sign of scales is ignored", no_signs),
    ):
        yield what, with_matrices(change).answer(situ)
