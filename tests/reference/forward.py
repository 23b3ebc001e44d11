# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's text model as one plain PyTorch forward over a whole sequence.

This is the truth a served engine is compared with, token for token. It keeps no cache of any kind:
every call computes every position again from the embedding. It reads the checkpoint itself and shares
no code with the engine or the converter, so agreement between them means something.

Anything it does not implement is an error, never a default: a configuration value outside the ones
written here, a tensor of another shape, a tensor of the language model that nothing read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from . import int4

if TYPE_CHECKING:
    from pathlib import Path

Weights = Literal["mxfp4", "int4-mse", "int4-amax"]

ROOT = "language_model."
NOT_LANGUAGE = ("vision_tower.", "mm_projector.")
KDA_CHUNK = 16
L2_EPSILON = 1e-6
# FusedRMSNormGated is built without an eps, so it has its own and not the configuration's.
GATED_NORM_EPSILON = 1e-5


# ---------------------------------------------------------------- configuration and checkpoint


@dataclass(frozen=True)
class Config:
    """The numbers the forward needs, from ``text_config`` of a Kimi-K3 ``config.json``."""

    vocab: int
    hidden: int
    layers: int
    eps: float
    situ_beta: float
    situ_linear_beta: float
    dense_layers: int
    dense_intermediate: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v_dim: int
    kda_layers: frozenset[int]  # counted from 0
    kda_heads: int
    kda_dim: int
    conv: int
    gate_lower_bound: float
    block: int
    experts: int
    top_k: int
    shared_experts: int
    expert_intermediate: int
    latent: int
    latent_norm: bool
    routed_scale: float

    @classmethod
    def read(cls, directory: Path) -> Config:
        """Read ``config.json`` in ``directory`` and refuse whatever this file does not implement."""
        document = json.loads((directory / "config.json").read_text())
        text = document["text_config"]
        linear = text["linear_attn_config"]
        quantisation = text.get("quantization_config") or document["quantization_config"]
        (scheme,) = quantisation["config_groups"].values()
        implemented: list[tuple[str, Any, Any]] = [
            ("hidden_act", text["hidden_act"], "situ"),
            ("mla_use_nope", text["mla_use_nope"], True),
            ("mla_use_output_gate", text["mla_use_output_gate"], True),
            ("use_full_rank_gate", linear["use_full_rank_gate"], True),
            ("moe_router_activation_func", text["moe_router_activation_func"], "sigmoid"),
            ("topk_method", text["topk_method"], "noaux_tc"),
            ("num_expert_group", text["num_expert_group"], 1),
            ("topk_group", text["topk_group"], 1),
            ("moe_renormalize", text["moe_renormalize"], True),
            ("moe_layer_freq", text["moe_layer_freq"], 1),
            ("tie_word_embeddings", text["tie_word_embeddings"], False),
            ("logit_scale", text.get("logit_scale", 1.0), 1.0),
            ("quantization format", quantisation["format"], "mxfp4-pack-quantized"),
            ("quantization group_size", scheme["weights"]["group_size"], int4.GROUP),
        ]
        for name, found, expected in implemented:
            if found != expected:
                raise NotImplementedError(f"{name} is {found!r}; this reference implements {expected!r}")
        layers = text["num_hidden_layers"]
        kda, full = set(linear["kda_layers"]), set(linear["full_attn_layers"])
        if kda & full or kda | full != set(range(1, layers + 1)):
            raise NotImplementedError("kda_layers and full_attn_layers must share out layers 1 to the last")
        return cls(
            vocab=text["vocab_size"],
            hidden=text["hidden_size"],
            layers=layers,
            eps=text["rms_norm_eps"],
            situ_beta=float(text["activation_situ_beta"]),
            situ_linear_beta=float(text["activation_situ_linear_beta"]),
            dense_layers=text["first_k_dense_replace"],
            dense_intermediate=text["intermediate_size"],
            heads=text["num_attention_heads"],
            q_rank=text["q_lora_rank"],
            kv_rank=text["kv_lora_rank"],
            nope=text["qk_nope_head_dim"],
            rope=text["qk_rope_head_dim"],
            v_dim=text["v_head_dim"],
            kda_layers=frozenset(layer - 1 for layer in kda),
            kda_heads=linear["num_heads"],
            kda_dim=linear["head_dim"],
            conv=linear["short_conv_kernel_size"],
            gate_lower_bound=float(linear["gate_lower_bound"]),
            block=text["attn_res_block_size"],
            experts=text["num_experts"],
            top_k=text["num_experts_per_token"],
            shared_experts=text["num_shared_experts"],
            expert_intermediate=text["moe_intermediate_size"],
            latent=text["routed_expert_hidden_size"],
            latent_norm=text["latent_moe_use_norm"],
            routed_scale=float(text["routed_scaling_factor"]),
        )


class Checkpoint:
    """The tensors of one checkpoint directory, each read once and accounted for."""

    def __init__(self, directory: Path, weights: Weights, dtype: torch.dtype) -> None:
        if weights not in ("mxfp4", "int4-mse", "int4-amax"):
            raise ValueError(f"unknown weights {weights!r}")
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        self._shard: dict[str, str] = index["weight_map"]
        # Typed as Any because safetensors annotates only part of its reader.
        self._files: dict[str, Any] = {
            name: safe_open(directory / name, framework="pt") for name in sorted(set(self._shard.values()))
        }
        self._weights = weights
        self._dtype = dtype
        self._unread = {name for name in self._shard if not name.startswith(NOT_LANGUAGE)}
        self.losses: dict[str, int4.Loss] = {}

    def raw(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name`` (below ``language_model.``) as stored, which must hold ``shape``."""
        tensor = self._read(name)
        # Historical layouts carry dimensions of size one: conv1d is [C, 1, W].
        if [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
            raise ValueError(f"{ROOT + name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.reshape(shape)

    def leading(self, name: str, count: int) -> Tensor:
        """The first ``count`` entries of a vector stored with padding behind them."""
        tensor = self._read(name).flatten()
        if len(tensor) < count:
            raise ValueError(f"{ROOT + name} has {len(tensor)} entries, expected at least {count}")
        return tensor[:count].to(self._dtype)

    def _read(self, name: str) -> Tensor:
        full = ROOT + name
        tensor: Tensor = self._files[self._shard[full]].get_tensor(full)
        self._unread.discard(full)
        return tensor

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name`` in the arithmetic's dtype."""
        tensor = self.raw(name, *shape)
        if not tensor.is_floating_point():
            raise TypeError(f"{ROOT + name} is {tensor.dtype}, expected a floating-point type")
        return tensor.to(self._dtype)

    def expert(self, name: str, rows: int, columns: int) -> Tensor:
        """The routed-expert matrix ``name`` in the values it is served with."""
        packed = self.raw(f"{name}.weight_packed", rows, columns // 2).numpy()
        e8m0 = self.raw(f"{name}.weight_scale", rows, columns // int4.GROUP).numpy()
        if self._weights == "mxfp4":
            return torch.from_numpy(int4.mxfp4_values(packed, e8m0)).to(self._dtype)
        matrix, loss = int4.requantise(packed, e8m0, "mse" if self._weights == "int4-mse" else "amax")
        self.losses[ROOT + name] = loss
        return torch.from_numpy(matrix.dequantise()).to(self._dtype)

    def finish(self) -> None:
        """Refuse a checkpoint holding language-model tensors that the forward does not use."""
        if self._unread:
            some = ", ".join(sorted(self._unread)[:5])
            raise ValueError(f"{len(self._unread)} tensors were not used, such as {some}")


# ---------------------------------------------------------------- the mathematics


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def situ_and_mul(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU: a SiLU whose linear factors saturate smoothly at ``beta`` and ``linear_beta``."""
    soft_gate = beta * torch.tanh(gate / beta)
    soft_up = linear_beta * torch.tanh(up / linear_beta)
    return soft_gate * torch.sigmoid(gate) * soft_up


def short_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution of ``x [T, C]`` with ``taps [C, W]``, then SiLU.

    The last tap meets the current token; tokens before the first count as zero.
    """
    tokens, width = x.shape[0], taps.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    mixed = torch.stack([padded[i : i + tokens] * taps[:, i] for i in range(width)]).sum(0)
    return F.silu(mixed)


def l2_norm(x: Tensor) -> Tensor:
    """Unit length over the last dimension; the epsilon is added to the sum, not to the mean."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def kda_log_decay(raw: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """The natural logarithm of each channel's decay, within ``[lower_bound, 0]``.

    ``raw [T, H, D]``, ``a_log [H]``, ``dt_bias [H, D]``.
    """
    return lower_bound * torch.sigmoid(a_log.exp()[:, None] * (raw + dt_bias))


def kda_recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule, token by token; the definition of what ``kda_scan`` computes.

    ``q``, ``k``, ``log_decay`` are ``[T, H, K]``, ``v`` is ``[T, H, V]``, ``beta`` ``[T, H]``. Per head
    the state ``S [V, K]`` starts at zero; each token decays it, corrects what it predicts for the key
    towards the value by ``beta``, and only then reads it with the query. The caller has normalised
    ``q`` and ``k`` and scaled ``q``.
    """
    tokens, heads, _ = k.shape
    state = v.new_zeros(heads, v.shape[2], k.shape[2])
    out = torch.empty_like(v)
    for t in range(tokens):
        state = state * log_decay[t].exp()[:, None, :]
        predicted = (state * k[t][:, None, :]).sum(-1)
        correction = beta[t][:, None] * (v[t] - predicted)
        state = state + correction[:, :, None] * k[t][:, None, :]
        out[t] = (state * q[t][:, None, :]).sum(-1)
    return out


def kda_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """``kda_recurrence`` in chunks, an order of magnitude faster and equal up to rounding.

    Inside a chunk let ``D_i`` be the running sum of ``log_decay`` and ``S`` the state before it. The
    corrections ``u_i`` (what each token adds to the state along its key) obey
    ``u_i = beta_i (v_i - S e^{D_i} k_i - sum_{j<i} u_j <k_i, e^{D_i - D_j} k_j>)``, a unit triangular
    system solved for all chunks at once; only ``S`` itself is carried from chunk to chunk.

    ``e^{D_i - D_j}`` is split at the chunk's middle, so that the inner products are one matrix product.
    Its halves reach ``e^{-KDA_CHUNK / 2 * log_decay}``, which the check below keeps within float32, and
    the sums are taken in float64, because a rounding of ``D`` is a relative error of the exponential.
    """
    if float(log_decay.min()) * KDA_CHUNK < -85:
        raise ValueError(f"a log decay of {float(log_decay.min())} overflows chunks of {KDA_CHUNK}")
    tokens = k.shape[0]
    padding = -tokens % KDA_CHUNK

    def chunks(x: Tensor) -> Tensor:
        """``[T, H, D]`` as ``[chunks, H, KDA_CHUNK, D]``; a padding token decays and adds nothing."""
        padded = F.pad(x, (0, 0, 0, 0, 0, padding))
        return padded.reshape(-1, KDA_CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()

    q, k, v, beta = chunks(q), chunks(k), chunks(v), chunks(beta[..., None])
    total = chunks(log_decay).double().cumsum(2)
    middle = total[:, :, KDA_CHUNK // 2 - 1, None]
    since_middle = (total - middle).exp().to(k.dtype)
    until_middle = since_middle.reciprocal()
    since_start = since_middle * middle.exp().to(k.dtype)
    until_end = until_middle * since_middle[:, :, -1:]
    keys = (until_middle * k).transpose(2, 3)
    key_key = ((since_middle * k) @ keys).tril(-1)
    query_key = ((since_middle * q) @ keys).tril()

    system = torch.eye(KDA_CHUNK, dtype=k.dtype) + beta * key_key
    solved = torch.linalg.solve_triangular(
        system, beta * torch.cat([v, since_start * k], dim=-1), upper=False, unitriangular=True
    )
    from_value, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    decayed_q = since_start * q
    remaining_k = (until_end * k).transpose(2, 3)

    out = torch.empty_like(v)
    state = v.new_zeros(k.shape[1], k.shape[3], v.shape[3])  # transposed: [H, K, V]
    for n in range(k.shape[0]):
        correction = from_value[n] - from_state[n] @ state
        out[n] = decayed_q[n] @ state + query_key[n] @ correction
        state = state * since_start[n, :, -1, :, None] + remaining_k[n] @ correction
    return out.transpose(1, 2).flatten(0, 1)[:tokens]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention of ``q, k [T, H, D]`` and ``v [T, H, V]``, each token seeing itself and before."""
    tokens = q.shape[0]
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return torch.einsum("hij,jhv->ihv", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def residual_mix(sources: list[Tensor], norm: Tensor, projection: Tensor, eps: float) -> Tensor:
    """Attention residual: each token's softmax-weighted mean over its ``sources``, each ``[T, hidden]``.

    A source is scored by the projection of its norm, but enters the mean as it is.
    """
    stacked = torch.stack(sources)
    scores = rms_norm(stacked, norm, eps) @ projection
    return (scores.softmax(0)[..., None] * stacked).sum(0)


def route(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, both ``[T, top_k]``.

    The bias steers which experts are chosen and is absent from their weights, which are the chosen
    sigmoid scores made to sum to ``scale``.
    """
    scores = logits.sigmoid()
    chosen = (scores + bias).topk(top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * scale


# ---------------------------------------------------------------- the layers


class Block(Protocol):
    """An attention or feed-forward block over a whole sequence ``[T, hidden]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """The block's contribution to the residual."""


class KdaAttention:
    """Kimi delta attention: short convolutions, the gated delta rule, a gated norm."""

    def __init__(self, load: Checkpoint, name: str, config: Config) -> None:
        heads, dim = config.kda_heads, config.kda_dim
        inner = heads * dim
        self.config = config
        self.project = {x: load(f"{name}.{x}_proj.weight", inner, config.hidden) for x in "qkvg"}
        self.taps = {x: load(f"{name}.{x}_conv1d.weight", inner, config.conv) for x in "qkv"}
        self.beta = load(f"{name}.b_proj.weight", heads, config.hidden)
        self.decay_down = load(f"{name}.f_a_proj.weight", dim, config.hidden)
        self.decay_up = load(f"{name}.f_b_proj.weight", inner, dim)
        # The published A_log is padded to a multiple of 128, and older files hold it as [1, 1, H, 1].
        self.a_log = load.leading(f"{name}.A_log", heads)
        self.dt_bias = load(f"{name}.dt_bias", inner).reshape(heads, dim)
        self.norm = load(f"{name}.o_norm.weight", dim)
        self.out = load(f"{name}.o_proj.weight", config.hidden, inner)

    def __call__(self, x: Tensor) -> Tensor:
        heads = (x.shape[0], self.config.kda_heads, self.config.kda_dim)
        q, k, v = (
            short_convolution(x @ self.project[name].T, self.taps[name]).reshape(heads) for name in "qkv"
        )
        raw_decay = (x @ self.decay_down.T @ self.decay_up.T).reshape(heads)
        mixed = kda_scan(
            l2_norm(q) * self.config.kda_dim**-0.5,
            l2_norm(k),
            v,
            kda_log_decay(raw_decay, self.a_log, self.dt_bias, self.config.gate_lower_bound),
            (x @ self.beta.T).sigmoid(),
        )
        gate = (x @ self.project["g"].T).reshape(heads).sigmoid()
        return (rms_norm(mixed, self.norm, GATED_NORM_EPSILON) * gate).flatten(1) @ self.out.T


class LatentAttention:
    """Multi-head latent attention without positions: the rope channels exist and are not rotated."""

    def __init__(self, load: Checkpoint, name: str, config: Config) -> None:
        head = config.nope + config.rope
        self.config = config
        self.q_down = load(f"{name}.q_a_proj.weight", config.q_rank, config.hidden)
        self.q_norm = load(f"{name}.q_a_layernorm.weight", config.q_rank)
        self.q_up = load(f"{name}.q_b_proj.weight", config.heads * head, config.q_rank)
        self.kv_down = load(f"{name}.kv_a_proj_with_mqa.weight", config.kv_rank + config.rope, config.hidden)
        self.kv_norm = load(f"{name}.kv_a_layernorm.weight", config.kv_rank)
        self.kv_up = load(
            f"{name}.kv_b_proj.weight", config.heads * (config.nope + config.v_dim), config.kv_rank
        )
        self.gate = load(f"{name}.g_proj.weight", config.heads * config.v_dim, config.hidden)
        self.out = load(f"{name}.o_proj.weight", config.hidden, config.heads * config.v_dim)

    def __call__(self, x: Tensor) -> Tensor:
        c, tokens = self.config, x.shape[0]
        q = rms_norm(x @ self.q_down.T, self.q_norm, c.eps) @ self.q_up.T
        latent, k_shared = (x @ self.kv_down.T).split([c.kv_rank, c.rope], dim=-1)
        kv = rms_norm(latent, self.kv_norm, c.eps) @ self.kv_up.T
        k_own, v = kv.reshape(tokens, c.heads, -1).split([c.nope, c.v_dim], dim=-1)
        k = torch.cat([k_own, k_shared[:, None, :].expand(-1, c.heads, -1)], dim=-1)
        q = q.reshape(tokens, c.heads, -1)
        mixed = causal_attention(q, k, v, (c.nope + c.rope) ** -0.5).flatten(1)
        return (mixed * (x @ self.gate.T).sigmoid()) @ self.out.T


class Mlp:
    """A gated feed-forward block with SiTU."""

    def __init__(self, config: Config, gate: Tensor, up: Tensor, down: Tensor) -> None:
        self.config = config
        self.gate, self.up, self.down = gate, up, down

    @classmethod
    def load(cls, load: Checkpoint, name: str, config: Config, intermediate: int) -> Mlp:
        """The unquantised block ``name``."""
        return cls(
            config,
            load(f"{name}.gate_proj.weight", intermediate, config.hidden),
            load(f"{name}.up_proj.weight", intermediate, config.hidden),
            load(f"{name}.down_proj.weight", config.hidden, intermediate),
        )

    def __call__(self, x: Tensor) -> Tensor:
        c = self.config
        inner = situ_and_mul(x @ self.gate.T, x @ self.up.T, c.situ_beta, c.situ_linear_beta)
        return inner @ self.down.T


class LatentMoe:
    """Routed experts in a latent space, beside shared experts in the full one.

    Routing reads the full hidden state. The routed sum is normed and projected back up before the
    shared experts' output is added.
    """

    def __init__(self, load: Checkpoint, name: str, config: Config) -> None:
        c, inner = config, config.expert_intermediate
        self.config = config
        self.gate = load(f"{name}.gate.weight", c.experts, c.hidden)
        self.bias = load(f"{name}.gate.e_score_correction_bias", c.experts)
        self.down = load(f"{name}.routed_expert_down_proj.weight", c.latent, c.hidden)
        self.norm = load(f"{name}.routed_expert_norm.weight", c.latent) if c.latent_norm else None
        self.up = load(f"{name}.routed_expert_up_proj.weight", c.hidden, c.latent)
        self.shared = Mlp.load(load, f"{name}.shared_experts", c, inner * c.shared_experts)
        self.experts = [
            Mlp(
                config,
                gate=load.expert(f"{name}.experts.{e}.w1", inner, c.latent),
                up=load.expert(f"{name}.experts.{e}.w3", inner, c.latent),
                down=load.expert(f"{name}.experts.{e}.w2", c.latent, inner),
            )
            for e in range(c.experts)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        chosen, weights = route(x @ self.gate.T, self.bias, self.config.top_k, self.config.routed_scale)
        latent = x @ self.down.T
        routed = torch.zeros_like(latent)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                routed[token] += weights[token, slot, None] * expert(latent[token])
        if self.norm is not None:
            routed = rms_norm(routed, self.norm, self.config.eps)
        return self.shared(x) + routed @ self.up.T


@dataclass(frozen=True)
class Residual:
    """What one attention-residual read needs: the scorer, and the norm applied to the result."""

    score_norm: Tensor
    score: Tensor
    output_norm: Tensor
    eps: float

    def __call__(self, sources: list[Tensor]) -> Tensor:
        mixed = residual_mix(sources, self.score_norm, self.score, self.eps)
        return rms_norm(mixed, self.output_norm, self.eps)

    @classmethod
    def load(cls, load: Checkpoint, scorer: str, output_norm: str, config: Config) -> Residual:
        """The scorer ``scorer``_norm and ``scorer``_proj, followed by ``output_norm``."""
        return cls(
            load(f"{scorer}_norm.weight", config.hidden),
            load(f"{scorer}_proj.weight", 1, config.hidden)[0],
            load(f"{output_norm}.weight", config.hidden),
            config.eps,
        )


@dataclass(frozen=True)
class Layer:
    """One decoder layer; ``opens_block`` is true on every ``attn_res_block_size``-th, from the first."""

    opens_block: bool
    before_attention: Residual
    attention: Block
    before_mlp: Residual
    mlp: Block

    @classmethod
    def load(cls, load: Checkpoint, index: int, config: Config) -> Layer:
        """Decoder layer ``index``, counted from 0."""
        name = f"model.layers.{index}"
        attention = KdaAttention if index in config.kda_layers else LatentAttention
        return cls(
            opens_block=index % config.block == 0,
            before_attention=Residual.load(
                load, f"{name}.self_attention_res", f"{name}.input_layernorm", config
            ),
            attention=attention(load, f"{name}.self_attn", config),
            before_mlp=Residual.load(load, f"{name}.mlp_res", f"{name}.post_attention_layernorm", config),
            mlp=Mlp.load(load, f"{name}.mlp", config, config.dense_intermediate)
            if index < config.dense_layers
            else LatentMoe(load, f"{name}.block_sparse_moe", config),
        )


@dataclass(frozen=True)
class ReferenceModel:
    """The whole text model, ready to run. Build it with ``load``."""

    config: Config
    embedding: Tensor
    layers: list[Layer]
    output: Residual
    head: Tensor
    losses: dict[str, int4.Loss]
    """Per expert matrix (``language_model...experts.E.w1``) what requantisation cost; none for mxfp4."""

    @classmethod
    def load(cls, directory: Path, *, weights: Weights, dtype: torch.dtype = torch.float32) -> ReferenceModel:
        """Read the checkpoint in ``directory``.

        ``weights`` says which values its MXFP4 experts are served with. ``dtype`` is the type of all
        arithmetic; float64 tells a near tie between two tokens from a real difference.
        """
        config = Config.read(directory)
        checkpoint = Checkpoint(directory, weights, dtype)
        model = cls(
            config=config,
            embedding=checkpoint("model.embed_tokens.weight", config.vocab, config.hidden),
            layers=[Layer.load(checkpoint, index, config) for index in range(config.layers)],
            output=Residual.load(checkpoint, "model.output_attn_res", "model.norm", config),
            head=checkpoint("lm_head.weight", config.vocab, config.hidden),
            losses=checkpoint.losses,
        )
        checkpoint.finish()
        return model

    def hidden(self, token_ids: list[int]) -> Tensor:
        """The normed output ``[T, hidden]`` that the head reads.

        ``running`` is the sum of block outputs since the current block opened (before the first: the
        embedding); ``closed`` holds the sums of the blocks before it. A layer that opens a block reads
        the old sum as its attention's input, closes it, and starts the new sum with its attention.
        """
        running = self.embedding[torch.tensor(token_ids, dtype=torch.long)]
        closed: list[Tensor] = []
        for layer in self.layers:
            attended = layer.attention(layer.before_attention([*closed, running]))
            if layer.opens_block:
                closed.append(running)
                running = attended
            else:
                running = running + attended
            running = running + layer.mlp(layer.before_mlp([*closed, running]))
        return self.output([*closed, running])

    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits ``[T, vocab]``: row ``t`` predicts the token after ``token_ids[t]``."""
        with torch.inference_mode():
            return self.hidden(token_ids) @ self.head.T

    def greedy(
        self, prompt_ids: list[int], max_new_tokens: int, *, draft: list[int] | None = None
    ) -> list[int]:
        """The ``max_new_tokens`` most probable tokens one after another; no token ends it early.

        A ``draft``, such as the answer under test, saves time and decides nothing: one forward over
        prompt and draft predicts every position of it, and the model being causal, predictions hold up
        to and including the first that contradicts the draft. The rest is then computed anew, with the
        rest of the draft. A right draft costs one forward in all, none or a useless one costs one a token.
        """
        tokens = list(prompt_ids)
        end = len(tokens) + max_new_tokens
        guess = tokens + list(draft or [])
        with torch.inference_mode():
            while len(tokens) < end:
                tried = tokens + guess[len(tokens) : end - 1]
                # The head need not see the prompt: row t of its output predicts position t + 1.
                rows = self.hidden(tried)[len(tokens) - 1 :] @ self.head.T
                for token in rows.argmax(-1).tolist():
                    tokens.append(token)
                    if tried[len(tokens) - 1 : len(tokens)] != [token]:
                        break
        return tokens[len(prompt_ids) :]
