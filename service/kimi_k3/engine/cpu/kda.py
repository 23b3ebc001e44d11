# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention (KDA) in PyTorch: one recurrence behind the three entry points of the GPU kernels.

Per head, with state S ``[V, K]``, decay g ``[K]`` and write strength b, a token does

    S = S * exp(g);   S = S + b * (v - S k) k^T;   out = S (q * K ** -0.5)

with q and k L2-normalised. Decay and strength come from raw projections:
``g = lower_bound * sigmoid(exp(A_log) * (raw_g + dt_bias))`` (or ``-exp(A_log) * softplus(...)``
without a bound) and ``b = sigmoid(raw_beta)``. Everything is computed in float32, as the kernels do.

The functions have the names, arguments and in-place effects of the vLLM functions that they stand in
for; a state row of index 0 is vLLM's null block: it reads as nothing and is never written.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

L2_EPSILON = 1e-6
"""Added to the squared norm of q and k, as in the kernels."""


def _normalise(vector: torch.Tensor) -> torch.Tensor:
    vector = vector.float()
    return vector * torch.rsqrt(vector.square().sum(-1, keepdim=True) + L2_EPSILON)


def _decay(
    raw_g: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor | None, lower_bound: float | None
) -> torch.Tensor:
    """Log decay ``[..., H, K]`` from the raw gate of the same shape."""
    gate = raw_g.float()
    if dt_bias is not None:
        gate = gate + dt_bias.float().view(gate.shape[-2:])
    rate = a_log.float().exp().unsqueeze(-1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * gate)
    return -rate * F.softplus(gate)


def _recur(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of B sequences.

    Args:
        state: ``[B, H, V, K]`` float32.
        q, k, decay: ``[B, H, K]`` float32; v: ``[B, H, V]``; beta: ``[B, H]``.

    Returns:
        The new state and the output ``[B, H, V]``.
    """
    state = state * decay.exp().unsqueeze(-2)
    correction = (v - (state @ k.unsqueeze(-1)).squeeze(-1)) * beta.unsqueeze(-1)
    state = state + correction.unsqueeze(-1) * k.unsqueeze(-2)
    return state, (state @ q.unsqueeze(-1)).squeeze(-1)


def _scan(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens ``[T, H, ...]`` of one sequence, one after the other, from state ``[H, V, K]``."""
    outputs = torch.empty_like(v)
    state = state.unsqueeze(0)
    for t in range(v.shape[0]):
        at = slice(t, t + 1)
        state, outputs[at] = _recur(state, q[at], k[at], v[at], decay[at], beta[at])
    return state.squeeze(0), outputs


def chunk_kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor | None = None,
    *,
    state_cache: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lower_bound: float | None = None,
    out: torch.Tensor | None = None,
    checkpoint_offsets: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Whole sequences; reads and writes ``state_cache[state_indices]`` in place.

    Args:
        q, k, v, raw_g: ``[1, T, H, 128]``, the sequences one after the other; raw_beta: ``[1, T, H]``.
        state_cache: ``[blocks, H, V, K]``.
        state_indices, has_initial_state: one per sequence.
        cu_seqlens: ``[sequences + 1]`` offsets into T.
    """
    if checkpoint_offsets is not None:
        raise NotImplementedError("prefix-cache checkpoints of KDA states are not supported on a CPU")
    result = torch.empty_like(v) if out is None else out
    q, k = _normalise(q[0]) * q.shape[-1] ** -0.5, _normalise(k[0])
    decay, beta = _decay(raw_g[0], A_log, g_bias, lower_bound), torch.sigmoid(raw_beta[0].float())
    bounds = cu_seqlens.tolist()
    for sequence, row in enumerate(state_indices.tolist()):
        at = slice(bounds[sequence], bounds[sequence + 1])
        resumed = row > 0 and bool(has_initial_state[sequence])
        initial = (
            state_cache[row].float() if resumed else torch.zeros_like(state_cache[0], dtype=torch.float32)
        )
        state, outputs = _scan(initial, q[at], k[at], v[0, at].float(), decay[at], beta[at])
        result[0, at] = outputs.to(result.dtype)
        if row > 0:
            state_cache[row] = state.to(state_cache.dtype)
    return result, None


def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """One token for each row ``[B, H, ...]``; rows of the null block yield zeros."""
    rows = rows.long()
    live = rows > 0
    output = torch.zeros_like(v)
    state, output[live] = _recur(
        states[rows[live]].float(), q[live], k[live], v[live], decay[live], beta[live]
    )
    states[rows[live]] = state.to(states.dtype)
    return output


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token each for the decodes of a mixed batch: ``[1, B, H, ...]``, states written in place."""
    if num_accepted_tokens is not None or ssm_state_indices.ndim != 1:
        raise NotImplementedError("speculative decoding is not supported on a CPU")
    output = _decode(
        _normalise(q[0]) * q.shape[-1] ** -0.5,
        _normalise(k[0]),
        v[0].float(),
        _decay(raw_g[0], A_log, dt_bias, lower_bound),
        torch.sigmoid(raw_beta[0].float()),
        initial_state,
        ssm_state_indices,
    )
    result = torch.empty_like(v) if out is None else out
    result[0] = output.to(result.dtype)
    return result, initial_state


def fused_recurrent_kda_packed_decode(
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    state_indices: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token each for a batch of decodes, from packed ``[B, H * (K + K + V)]`` q, k and v."""
    _, heads, value_size, key_size = initial_state.shape
    q, k, v = mixed_qkv.split([heads * key_size, heads * key_size, heads * value_size], dim=-1)
    output = _decode(
        _normalise(q.unflatten(-1, (heads, -1))) * (scale or key_size**-0.5),
        _normalise(k.unflatten(-1, (heads, -1))),
        v.unflatten(-1, (heads, -1)).float(),
        _decay(raw_g[0], A_log, dt_bias, lower_bound),
        torch.sigmoid(raw_beta[0].float()),
        initial_state,
        state_indices,
    )
    return output.to(mixed_qkv.dtype).unsqueeze(0), initial_state
