# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's text model for training: batched, differentiable, in plain PyTorch.

What the layers compute is what ``tests/reference/forward.py`` computes, which a test holds it to; that file
explains the mathematics. Modules and parameters have the names of the published checkpoint below
``language_model.``, but for the routed experts, which are stacked: ``experts.w1`` is ``[E, inner, latent]``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.miniature.quantise import through_mxfp4

CHUNK: Final = 64
"""Tokens whose corrections are solved for at once."""
PART: Final = 16
"""Tokens of a chunk that share a point of reference: float32 holds the strongest decay over half of them."""
L2_EPSILON: Final = 1e-6
GATED_NORM_EPSILON: Final = 1e-5


@dataclass(frozen=True)
class Sizes:
    """The miniature's sizes. Attention and KDA heads have the published widths, which vLLM's kernels need."""

    vocab: int = 704
    hidden: int = 256
    layers: int = 8
    heads: int = 2
    q_rank: int = 128
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    v_dim: int = 128
    full_attention: tuple[int, ...] = (3, 7)
    kda_heads: int = 2
    kda_dim: int = 128
    conv: int = 4
    gate_lower_bound: float = -5.0
    block: int = 3
    dense_layers: int = 1
    dense_intermediate: int = 512
    experts: int = 20
    top_k: int = 4
    shared_experts: int = 1
    expert_intermediate: int = 128
    latent: int = 128
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    eps: float = 1e-5


# ---------------------------------------------------------------- Kimi delta attention


def inverse_of_unit_lower(below: Tensor) -> Tensor:
    """``(I + below)^-1`` for strictly lower triangular ``below [..., n, n]``, n a power of two.

    By halves: ``[[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]``. Up to 8 by a product that ends,
    because the eighth power of ``below`` is zero.
    """
    n = below.shape[-1]
    if n <= 8:
        eye = torch.eye(n, dtype=below.dtype, device=below.device)
        square = below @ below
        return (eye - below) @ (eye + square) @ (eye + square @ square)
    half = n // 2
    both = torch.stack([below[..., :half, :half], below[..., half:, half:]])
    first, second = inverse_of_unit_lower(both).unbind(0)
    corner = -second @ below[..., half:, :half] @ first
    top = torch.cat([first, torch.zeros_like(first)], dim=-1)
    return torch.cat([top, torch.cat([corner, second], dim=-1)], dim=-2)


def kda_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over ``q, k, v, log_decay [B, H, T, D]`` and ``beta [B, H, T]``, T a multiple of
    ``CHUNK``; the formulas are those of the reference's ``kda_scan``, with longer chunks.

    ``e^{D_i - D_j}`` has no common factorisation over 64 tokens that float32 can hold, so each part of 16
    queries has a point of reference of its own. Seen from it, earlier keys only decay.
    """

    def chunks(x: Tensor) -> Tensor:
        chunked: Tensor = x.unflatten(2, (-1, CHUNK))
        return chunked

    q, k, v, beta = chunks(q), chunks(k), chunks(v), chunks(beta)[..., None]
    total = chunks(log_decay).cumsum(3)  # [B, H, chunks, CHUNK, D]
    parts = total.unflatten(3, (-1, PART))
    reference = parts[..., PART // 2 - 1, :][..., None, :]  # [B, H, chunks, parts, 1, D]
    # Keys behind a part's queries are masked below; the bound keeps their factors finite until then.
    keys = k[..., None, :, :] * (reference - total[..., None, :, :]).clamp(max=45.0).exp()
    since = (parts - reference).exp()

    def against_keys(x: Tensor) -> Tensor:
        seen: Tensor = (x.unflatten(3, (-1, PART)) * since) @ keys.transpose(-1, -2)
        return seen.flatten(3, 4)  # [B, H, chunks, CHUNK, CHUNK]

    key_key, query_key = against_keys(k).tril(-1), against_keys(q).tril()
    decayed = total.exp()
    solved = inverse_of_unit_lower(beta * key_key) @ (beta * torch.cat([v, decayed * k], dim=-1))
    from_value, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    decayed_q = decayed * q
    remaining_k = ((total[..., -1:, :] - total).exp() * k).transpose(-1, -2)
    over_chunk = decayed[..., -1, :, None]

    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for n in range(k.shape[2]):
        correction = from_value[:, :, n] - from_state[:, :, n] @ state
        out.append(decayed_q[:, :, n] @ state + query_key[:, :, n] @ correction)
        state = state * over_chunk[:, :, n] + remaining_k[:, :, n] @ correction
    return torch.cat(out, dim=2)


def l2_norm(x: Tensor) -> Tensor:
    """Unit length over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def rms(x: Tensor, eps: float) -> Tensor:
    """Unit root mean square over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., width]``."""
        return rms(x, self.eps) * self.weight


class Convolution(nn.Module):
    """Causal depthwise convolution with SiLU; the last tap meets the current token."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, T, C]``."""
        taps, tokens = self.weight[:, 0], x.shape[1]
        padded = F.pad(x.float(), (0, 0, taps.shape[1] - 1, 0))
        return F.silu(
            sum((padded[:, i : i + tokens] * taps[:, i] for i in range(taps.shape[1])), x.new_zeros(()))
        )


def linear(columns: int, rows: int, gain: float = 1.0) -> nn.Linear:
    """A projection whose output has standard deviation ``gain`` for a unit input."""
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=gain * columns**-0.5)
    return layer


class KdaAttention(nn.Module):
    """Kimi delta attention: short convolutions, the gated delta rule, a gated norm."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s, inner = s, s.kda_heads * s.kda_dim
        self.q_proj, self.k_proj = linear(s.hidden, inner), linear(s.hidden, inner)
        self.v_proj, self.g_proj = linear(s.hidden, inner), linear(s.hidden, inner)
        self.q_conv1d, self.k_conv1d = Convolution(inner, s.conv), Convolution(inner, s.conv)
        self.v_conv1d = Convolution(inner, s.conv)
        self.b_proj = linear(s.hidden, s.kda_heads)
        self.f_a_proj, self.f_b_proj = linear(s.hidden, s.kda_dim), linear(s.kda_dim, inner, 0.3)
        self.A_log = nn.Parameter(torch.zeros(s.kda_heads))
        # At the start the channels forget at rates from 0.002 to 1 a token, evenly in the logarithm.
        rates = torch.exp(torch.empty(inner).uniform_(math.log(0.002), 0.0))
        self.dt_bias = nn.Parameter(torch.logit(rates / -s.gate_lower_bound))
        self.o_norm = Norm(s.kda_dim, GATED_NORM_EPSILON)
        self.o_proj = linear(inner, s.hidden, (2 * s.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, T, hidden]``; T is padded to whole chunks inside."""
        s, tokens = self.s, x.shape[1]

        def heads(y: Tensor) -> Tensor:
            padded: Tensor = F.pad(y.float(), (0, 0, 0, -tokens % CHUNK))
            split: Tensor = padded.unflatten(-1, (s.kda_heads, -1))
            return split.transpose(1, 2)

        q, k = heads(self.q_conv1d(self.q_proj(x))), heads(self.k_conv1d(self.k_proj(x)))
        v = heads(self.v_conv1d(self.v_proj(x)))
        raw = heads(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)
        beta = heads(self.b_proj(x).float().sigmoid())[..., 0]
        with torch.autocast(x.device.type, enabled=False):
            log_decay = s.gate_lower_bound * torch.sigmoid(self.A_log.exp()[:, None, None] * raw)
            mixed = kda_scan(l2_norm(q) * s.kda_dim**-0.5, l2_norm(k), v, log_decay, beta)
        normed = self.o_norm(mixed.transpose(1, 2)[:, :tokens]).flatten(2)
        out: Tensor = self.o_proj(normed * self.g_proj(x).float().sigmoid())
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention without positions, gated."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s, head = s, s.nope + s.rope
        self.q_a_proj, self.q_a_layernorm = linear(s.hidden, s.q_rank), Norm(s.q_rank, s.eps)
        self.q_b_proj = linear(s.q_rank, s.heads * head)
        self.kv_a_proj_with_mqa = linear(s.hidden, s.kv_rank + s.rope)
        self.kv_a_layernorm = Norm(s.kv_rank, s.eps)
        self.kv_b_proj = linear(s.kv_rank, s.heads * (s.nope + s.v_dim))
        self.g_proj = linear(s.hidden, s.heads * s.v_dim)
        self.o_proj = linear(s.heads * s.v_dim, s.hidden, (2 * s.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, T, hidden]``."""
        s = self.s
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (s.heads, -1))
        latent, k_shared = self.kv_a_proj_with_mqa(x).split([s.kv_rank, s.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (s.heads, -1))
        k_own, v = kv.split([s.nope, s.v_dim], dim=-1)
        k = torch.cat([k_own, k_shared[:, :, None, :].expand(-1, -1, s.heads, -1)], dim=-1)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=(s.nope + s.rope) ** -0.5,
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2) * self.g_proj(x).float().sigmoid())
        return out


# ---------------------------------------------------------------- feed-forward


def situ_and_mul(gate: Tensor, up: Tensor, s: Sizes) -> Tensor:
    """SiTU: a SiLU whose linear factors saturate smoothly at the two betas."""
    soft_gate = s.situ_beta * torch.tanh(gate.float() / s.situ_beta)
    return (
        soft_gate * torch.sigmoid(gate.float()) * (s.situ_linear_beta * torch.tanh(up / s.situ_linear_beta))
    )


class Mlp(nn.Module):
    """A gated feed-forward block with SiTU."""

    def __init__(self, s: Sizes, inner: int) -> None:
        super().__init__()
        self.s = s
        self.gate_proj, self.up_proj = linear(s.hidden, inner), linear(s.hidden, inner)
        self.down_proj = linear(inner, s.hidden, (2 * s.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, T, hidden]``."""
        out: Tensor = self.down_proj(situ_and_mul(self.gate_proj(x), self.up_proj(x), self.s))
        return out


class Router(nn.Module):
    """Sigmoid scores; the bias steers the choice alone and follows the load, without a gradient."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.top_k = s.top_k
        self.weight = nn.Parameter(torch.randn(s.experts, s.hidden) * s.hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(s.experts))
        self.register_buffer("load", torch.zeros(s.experts), persistent=False)
        self.e_score_correction_bias: Tensor
        self.load: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Each token's weights ``[B, T, E]``, zero but for its experts, where they sum to one."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.load += mask.detach().sum((0, 1))
        weights = scores * mask
        return weights / weights.sum(-1, keepdim=True)

    @torch.no_grad()
    def balance(self, rate: float) -> Tensor:
        """Move the bias towards an even load; returns the largest load over the mean one."""
        worst = self.load.max() / self.load.mean()
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()
        return worst


class Experts(nn.Module):
    """Every expert for every token, weighted: more work than needed, but two matrix products for all."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s, self.quantised = s, False
        shape = (s.experts, s.expert_intermediate, s.latent)
        self.w1 = nn.Parameter(torch.randn(shape) * s.latent**-0.5)
        self.w3 = nn.Parameter(torch.randn(shape) * s.latent**-0.5)
        self.w2 = nn.Parameter(
            torch.randn(s.experts, s.latent, s.expert_intermediate) * s.expert_intermediate**-0.5
        )

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """``x [B, T, latent]``, ``weights [B, T, E]``."""
        w1, w2, w3 = (through_mxfp4(w) if self.quantised else w for w in (self.w1, self.w2, self.w3))
        gate, up = F.linear(x, w1.flatten(0, 1)), F.linear(x, w3.flatten(0, 1))
        inner = situ_and_mul(gate, up, self.s).unflatten(-1, (self.s.experts, -1)) * weights[..., None]
        return F.linear(inner.flatten(-2), w2.transpose(0, 1).flatten(1))


class LatentMoe(nn.Module):
    """Routed experts in a latent space, beside shared experts in the full one."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.gate = Router(s)
        self.routed_expert_down_proj = linear(s.hidden, s.latent)
        self.experts = Experts(s)
        self.routed_expert_norm = Norm(s.latent, s.eps)
        self.routed_expert_up_proj = linear(s.latent, s.hidden, (2 * s.layers) ** -0.5)
        self.shared_experts = Mlp(s, s.expert_intermediate * s.shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, T, hidden]``."""
        routed = self.experts(self.routed_expert_down_proj(x), self.gate(x))
        out: Tensor = self.shared_experts(x) + self.routed_expert_up_proj(self.routed_expert_norm(routed))
        return out


# ---------------------------------------------------------------- the whole


def residual_mix(sources: list[Tensor], norm: Norm, projection: nn.Linear) -> Tensor:
    """Attention residual: each token's softmax-weighted mean over ``sources``, each ``[B, T, hidden]``."""
    stacked = torch.stack(sources).float()
    scores: Tensor = (norm(stacked) * projection.weight[0]).sum(-1, keepdim=True)
    return (scores.softmax(0) * stacked).sum(0)


class Layer(nn.Module):
    """One decoder layer; every ``block``-th, from the first, opens a block of the attention residual."""

    def __init__(self, s: Sizes, index: int) -> None:
        super().__init__()
        self.opens_block = index % s.block == 0
        self.self_attention_res_norm = Norm(s.hidden, s.eps)
        self.self_attention_res_proj = nn.Linear(s.hidden, 1, bias=False)
        self.input_layernorm = Norm(s.hidden, s.eps)
        self.self_attn = LatentAttention(s) if index in s.full_attention else KdaAttention(s)
        self.mlp_res_norm = Norm(s.hidden, s.eps)
        self.mlp_res_proj = nn.Linear(s.hidden, 1, bias=False)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        if index < s.dense_layers:
            self.mlp = Mlp(s, s.dense_intermediate)
        else:
            self.block_sparse_moe = LatentMoe(s)
        for projection in (self.self_attention_res_proj, self.mlp_res_proj):
            nn.init.zeros_(projection.weight)

    def attend(self, sources: list[Tensor]) -> Tensor:
        """What the attention adds."""
        mixed = residual_mix(sources, self.self_attention_res_norm, self.self_attention_res_proj)
        out: Tensor = self.self_attn(self.input_layernorm(mixed))
        return out

    def feed(self, sources: list[Tensor]) -> Tensor:
        """What the feed-forward block adds."""
        mixed = residual_mix(sources, self.mlp_res_norm, self.mlp_res_proj)
        block = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        out: Tensor = block(self.post_attention_layernorm(mixed))
        return out

    def forward(self, closed: list[Tensor], running: Tensor) -> tuple[list[Tensor], Tensor]:
        """The closed blocks' sums and the running one, before and after this layer."""
        attended = self.attend([*closed, running])
        if self.opens_block:
            closed, running = [*closed, running], attended.float()
        else:
            running = running + attended
        return closed, running + self.feed([*closed, running])


class Decoder(nn.Module):
    """Everything below the head."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(s, index) for index in range(s.layers))
        self.output_attn_res_norm = Norm(s.hidden, s.eps)
        self.output_attn_res_proj = nn.Linear(s.hidden, 1, bias=False)
        nn.init.zeros_(self.output_attn_res_proj.weight)
        self.norm = Norm(s.hidden, s.eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens [B, T]`` to ``[B, T, hidden]``."""
        closed: list[Tensor] = []
        running: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            closed, running = layer(closed, running)
        mixed = residual_mix([*closed, running], self.output_attn_res_norm, self.output_attn_res_proj)
        out: Tensor = self.norm(mixed)
        return out


class Miniature(nn.Module):
    """The language model."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.model = Decoder(s)
        self.lm_head = linear(s.hidden, s.vocab, 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens [B, T]`` to logits ``[B, T, vocab]``; position t predicts token t + 1."""
        out: Tensor = self.lm_head(self.model(tokens))
        return out

    def routers(self) -> list[Router]:
        """The routers, from the first layer on."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def quantise(self, on: bool) -> None:
        """Let the experts compute with their MXFP4 values, or with their own."""
        for module in self.modules():
            if isinstance(module, Experts):
                module.quantised = on
