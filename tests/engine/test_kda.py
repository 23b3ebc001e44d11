# SPDX-License-Identifier: Apache-2.0
"""The CPU stand-ins for Kimi Delta Attention against the definition in the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kimi_k3.engine.cpu.kda import chunk_kda_prefill, fused_recurrent_kda, fused_recurrent_kda_packed_decode
from tests.reference.forward import kda_log_decay, kda_recurrence, l2_norm

HEADS, SIZE, BOUND = 2, 16, -5.0


@dataclass(frozen=True)
class Sequence:
    """Raw projections of one sequence, as the model hands them to the kernels."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    raw_g: torch.Tensor
    raw_beta: torch.Tensor

    @classmethod
    def random(cls, tokens: int, seed: int) -> Sequence:
        generator = torch.Generator().manual_seed(seed)
        q, k, v, raw_g = torch.randn(4, tokens, HEADS, SIZE, generator=generator)
        return cls(q, k, v, raw_g, torch.randn(tokens, HEADS, generator=generator))

    def tokens(self, at: slice) -> dict[str, torch.Tensor]:
        """Arguments for some tokens, with the leading batch dimension that the kernels expect."""
        return {name: getattr(self, name)[at].unsqueeze(0) for name in ("q", "k", "v", "raw_g", "raw_beta")}

    def expected(self) -> torch.Tensor:
        return kda_recurrence(
            l2_norm(self.q) * SIZE**-0.5,
            l2_norm(self.k),
            self.v,
            kda_log_decay(self.raw_g, A_LOG, DT_BIAS.view(HEADS, SIZE), BOUND),
            self.raw_beta.sigmoid(),
        )


A_LOG = torch.tensor([0.1, -0.4])
DT_BIAS = torch.linspace(-1, 1, HEADS * SIZE)


def _prefill(
    part: dict[str, torch.Tensor],
    states: torch.Tensor,
    rows: list[int],
    bounds: list[int],
    *,
    resumed: bool = False,
) -> torch.Tensor:
    out, _ = chunk_kda_prefill(
        **part,
        A_log=A_LOG,
        g_bias=DT_BIAS,
        lower_bound=BOUND,
        state_cache=states,
        state_indices=torch.tensor(rows, dtype=torch.int32),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        has_initial_state=torch.tensor([resumed] * len(rows)),
    )
    return out[0]


def test_prefill_of_several_sequences_equals_the_definition() -> None:
    """Sequences share a call but not a state; a reused row must not leak what it held before."""
    sequences = [Sequence.random(5, 1), Sequence.random(9, 2)]
    states = torch.full((4, HEADS, SIZE, SIZE), 7.0)
    both = {
        name: torch.cat([s.tokens(slice(None))[name] for s in sequences], dim=1)
        for name in ("q", "k", "v", "raw_g", "raw_beta")
    }
    out = _prefill(both, states, [3, 1], [0, 5, 14])
    torch.testing.assert_close(out, torch.cat([s.expected() for s in sequences]), rtol=1e-5, atol=1e-6)
    assert torch.equal(states[2], torch.full_like(states[2], 7.0))


def test_decodes_continue_where_the_prefill_stopped() -> None:
    """Prefill and both decode entry points share one state; its layout [V, K] must be the same in all."""
    sequence = Sequence.random(8, 3)
    states = torch.zeros(3, HEADS, SIZE, SIZE)
    outputs = [_prefill(sequence.tokens(slice(0, 5)), states, [2], [0, 5])]
    outputs.append(_prefill(sequence.tokens(slice(5, 6)), states, [2], [0, 1], resumed=True))
    mixed, _ = fused_recurrent_kda(
        **sequence.tokens(slice(6, 7)),
        A_log=A_LOG,
        dt_bias=DT_BIAS,
        lower_bound=BOUND,
        initial_state=states,
        cu_seqlens=torch.tensor([0, 1]),
        ssm_state_indices=torch.tensor([2]),
    )
    last = sequence.tokens(slice(7, 8))
    packed, _ = fused_recurrent_kda_packed_decode(
        torch.cat([last[name].flatten(2)[0] for name in ("q", "k", "v")], dim=-1),
        last["raw_g"],
        last["raw_beta"],
        A_LOG,
        DT_BIAS,
        BOUND,
        states,
        torch.tensor([2]),
    )
    torch.testing.assert_close(
        torch.cat([*outputs, mixed[0], packed[0]]), sequence.expected(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("row", [0, -1])
def test_the_null_block_yields_zeros_and_is_not_written(row: int) -> None:
    """vLLM pads batches with row 0 (or -1): whatever is computed there must reach nobody."""
    sequence = Sequence.random(1, 4)
    states = torch.ones(2, HEADS, SIZE, SIZE)
    part = sequence.tokens(slice(None))
    out, _ = fused_recurrent_kda_packed_decode(
        torch.cat([part[name].flatten(2)[0] for name in ("q", "k", "v")], dim=-1),
        part["raw_g"],
        part["raw_beta"],
        A_LOG,
        DT_BIAS,
        BOUND,
        states,
        torch.tensor([row]),
    )
    assert not out.any()
    assert torch.equal(states, torch.ones_like(states))


def test_without_a_bound_the_gate_is_a_softplus() -> None:
    """Kimi-Linear checkpoints have no lower bound; the decay is then -exp(A_log) * softplus."""
    sequence = Sequence.random(1, 5)
    states = torch.zeros(2, HEADS, SIZE, SIZE)
    states[1] = torch.randn(HEADS, SIZE, SIZE, generator=torch.Generator().manual_seed(6))
    before = states[1].clone()
    fused_recurrent_kda(
        **sequence.tokens(slice(None)),
        A_log=A_LOG,
        dt_bias=None,
        lower_bound=None,
        initial_state=states,
        cu_seqlens=torch.tensor([0, 1]),
        ssm_state_indices=torch.tensor([1]),
    )
    decay = (-A_LOG.exp()[:, None] * torch.nn.functional.softplus(sequence.raw_g[0])).exp()
    decayed = before * decay[:, None, :]
    k, beta = l2_norm(sequence.k[0]), sequence.raw_beta[0].sigmoid()
    correction = (sequence.v[0] - (decayed @ k[..., None])[..., 0]) * beta[:, None]
    torch.testing.assert_close(states[1], decayed + correction[..., None] * k[:, None, :])
