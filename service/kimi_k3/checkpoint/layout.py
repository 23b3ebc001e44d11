# SPDX-License-Identifier: Apache-2.0
"""Which tensors a Kimi-K3 checkpoint holds: names, dtypes and shapes, computed from its config.

The names are those vLLM's ``KimiLinearForCausalLM.load_weights`` and ``KimiK3ForConditionalGeneration``
accept; the dtypes are those of the published checkpoint. For the published config the layout gives
exactly the published 497,220 tensors and 1,560,860,324,864 bytes, which the tests hold on to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kimi_k3.checkpoint.config import MX_GROUP_SIZE
from kimi_k3.checkpoint.headers import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kimi_k3.checkpoint.config import KimiK3Config, TextConfig, VisionConfig

#: Prefix of the decoder's tensors inside the multimodal checkpoint.
TEXT_PREFIX = "language_model."
LAYER_PREFIX = f"{TEXT_PREFIX}model.layers."
#: gate, down, up: the order in which vLLM names the three projections of a routed expert.
EXPERT_PROJECTIONS = ("w1", "w2", "w3")
#: MXFP4 codes (two per byte) and their E8M0 scales.
EXPERT_PARTS = ("weight_packed", "weight_scale")
#: ``A_log`` has one entry per KDA head and is stored padded with unused entries: 128 for 96 heads in
#: the published checkpoint. vLLM's loader reads the first ``num_heads``.
A_LOG_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as safetensors describes it.

    Attributes:
        name: its full name in the checkpoint.
        dtype: safetensors' name of the dtype, e.g. ``"BF16"``.
        shape: elements per axis, outermost first; a packed MXFP4 row counts bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements (bytes, for packed MXFP4)."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.elements * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What one routed expert looks like in the checkpoint.

    Attributes:
        hidden: input width K of w1/w3 and output width N of w2, in elements.
        intermediate: output width N of w1/w3 and input width K of w2, in elements.
        specs: per (projection, part), dtype and shape; U8 ``[N, K/2]`` codes and U8 ``[N, K/32]`` scales.
        nbytes: bytes of one expert, codes and scales of all three projections.
    """

    hidden: int
    intermediate: int
    specs: Mapping[tuple[str, str], tuple[str, tuple[int, ...]]]
    nbytes: int


def expert_shape(text: TextConfig) -> ExpertShape:
    """Shapes and bytes of one routed expert."""
    hidden, inner = text.expert_hidden, text.moe_intermediate_size
    specs: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for projection in EXPERT_PROJECTIONS:
        rows, columns = (hidden, inner) if projection == "w2" else (inner, hidden)
        specs[projection, "weight_packed"] = ("U8", (rows, columns // 2))
        specs[projection, "weight_scale"] = ("U8", (rows, columns // MX_GROUP_SIZE))
    nbytes = sum(math.prod(shape) for _, shape in specs.values())
    return ExpertShape(hidden=hidden, intermediate=inner, specs=specs, nbytes=nbytes)


def expert_prefix(layer: int, expert: int) -> str:
    """``language_model.model.layers.L.block_sparse_moe.experts.E`` (both 0-based)."""
    return f"{LAYER_PREFIX}{layer}.block_sparse_moe.experts.{expert}"


def expert_tensors(text: TextConfig, layer: int) -> Iterator[TensorSpec]:
    """The routed experts' tensors of one MoE layer, expert by expert."""
    shape = expert_shape(text)
    for expert in range(text.num_experts):
        prefix = expert_prefix(layer, expert)
        for (projection, part), (dtype, dims) in shape.specs.items():
            yield TensorSpec(f"{prefix}.{projection}.{part}", dtype, dims)


def _kda(text: TextConfig) -> Iterator[TensorSpec]:
    linear, hidden = text.linear_attn_config, text.hidden_size
    heads, width = linear.num_heads, linear.num_heads * linear.head_dim
    for name in ("q", "k", "v"):
        yield TensorSpec(f"{name}_proj.weight", "BF16", (width, hidden))
        yield TensorSpec(f"{name}_conv1d.weight", "F32", (width, 1, linear.short_conv_kernel_size))
    yield TensorSpec("f_a_proj.weight", "BF16", (linear.head_dim, hidden))
    yield TensorSpec("f_b_proj.weight", "BF16", (width, linear.head_dim))
    yield TensorSpec("A_log", "F32", (math.ceil(heads / A_LOG_MULTIPLE) * A_LOG_MULTIPLE,))
    yield TensorSpec("dt_bias", "F32", (width,))
    yield TensorSpec("b_proj.weight", "BF16", (heads, hidden))
    yield TensorSpec("g_proj.weight", "BF16", (width, hidden))
    yield TensorSpec("o_norm.weight", "F32", (linear.head_dim,))
    yield TensorSpec("o_proj.weight", "BF16", (hidden, width))


def _mla(text: TextConfig) -> Iterator[TensorSpec]:
    hidden, heads, rank = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    query = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
    value = heads * text.v_head_dim
    if text.q_lora_rank is None:
        yield TensorSpec("q_proj.weight", "BF16", (query, hidden))
    else:
        yield TensorSpec("q_a_proj.weight", "BF16", (text.q_lora_rank, hidden))
        yield TensorSpec("q_a_layernorm.weight", "BF16", (text.q_lora_rank,))
        yield TensorSpec("q_b_proj.weight", "BF16", (query, text.q_lora_rank))
    yield TensorSpec("kv_a_proj_with_mqa.weight", "BF16", (rank + text.qk_rope_head_dim, hidden))
    yield TensorSpec("kv_a_layernorm.weight", "BF16", (rank,))
    yield TensorSpec("kv_b_proj.weight", "BF16", (heads * text.qk_nope_head_dim + value, rank))
    if text.mla_use_output_gate:
        yield TensorSpec("g_proj.weight", "BF16", (value, hidden))
    yield TensorSpec("o_proj.weight", "BF16", (hidden, value))


def _mlp(hidden: int, inner: int) -> Iterator[TensorSpec]:
    yield TensorSpec("gate_proj.weight", "BF16", (inner, hidden))
    yield TensorSpec("up_proj.weight", "BF16", (inner, hidden))
    yield TensorSpec("down_proj.weight", "BF16", (hidden, inner))


def _moe(text: TextConfig) -> Iterator[TensorSpec]:
    hidden, latent = text.hidden_size, text.routed_expert_hidden_size
    yield TensorSpec("gate.weight", "BF16", (text.num_experts, hidden))
    yield TensorSpec("gate.e_score_correction_bias", "F32", (text.num_experts,))
    if latent is not None:
        yield TensorSpec("routed_expert_down_proj.weight", "BF16", (latent, hidden))
        if text.latent_moe_use_norm:
            yield TensorSpec("routed_expert_norm.weight", "BF16", (latent,))
        yield TensorSpec("routed_expert_up_proj.weight", "BF16", (hidden, latent))
    if text.num_shared_experts:
        inner = text.moe_intermediate_size * text.num_shared_experts
        yield from _under("shared_experts.", _mlp(hidden, inner))


def _under(prefix: str, specs: Iterator[TensorSpec]) -> Iterator[TensorSpec]:
    for spec in specs:
        yield TensorSpec(prefix + spec.name, spec.dtype, spec.shape)


def layer_tensors(text: TextConfig, layer: int) -> Iterator[TensorSpec]:
    """One decoder layer's tensors (0-based ``layer``) without its routed experts."""
    prefix, hidden = f"{LAYER_PREFIX}{layer}.", text.hidden_size
    if text.attn_res_block_size is not None:
        for name in ("self_attention", "mlp"):
            yield TensorSpec(f"{prefix}{name}_res_norm.weight", "BF16", (hidden,))
            yield TensorSpec(f"{prefix}{name}_res_proj.weight", "BF16", (1, hidden))
    yield TensorSpec(f"{prefix}input_layernorm.weight", "BF16", (hidden,))
    yield TensorSpec(f"{prefix}post_attention_layernorm.weight", "BF16", (hidden,))
    is_kda = layer + 1 in text.linear_attn_config.kda_layers
    yield from _under(f"{prefix}self_attn.", _kda(text) if is_kda else _mla(text))
    if layer in text.moe_layers:
        yield from _under(f"{prefix}block_sparse_moe.", _moe(text))
    else:
        yield from _under(f"{prefix}mlp.", _mlp(hidden, text.intermediate_size))


def outer_tensors(text: TextConfig) -> Iterator[TensorSpec]:
    """The decoder's tensors outside its layers: embedding, final norms, head."""
    hidden = text.hidden_size
    yield TensorSpec(f"{TEXT_PREFIX}model.embed_tokens.weight", "BF16", (text.vocab_size, hidden))
    yield TensorSpec(f"{TEXT_PREFIX}model.norm.weight", "BF16", (hidden,))
    if text.attn_res_block_size is not None:
        yield TensorSpec(f"{TEXT_PREFIX}model.output_attn_res_norm.weight", "BF16", (hidden,))
        yield TensorSpec(f"{TEXT_PREFIX}model.output_attn_res_proj.weight", "BF16", (1, hidden))
    yield TensorSpec(f"{TEXT_PREFIX}lm_head.weight", "BF16", (text.vocab_size, hidden))


def vision_tensors(vision: VisionConfig, hidden: int) -> Iterator[TensorSpec]:
    """The image encoder and its projector into the decoder's width ``hidden``; all BF16."""
    width, patch = vision.vt_hidden_size, vision.patch_size
    rows, columns = vision.init_pos_emb_height, vision.init_pos_emb_width
    tower = "vision_tower."
    yield TensorSpec(f"{tower}patch_embed.proj.weight", "BF16", (width, 3, patch, patch))
    yield TensorSpec(f"{tower}patch_embed.pos_emb.weight", "BF16", (rows, columns, width))
    for block in range(vision.vt_num_hidden_layers):
        prefix = f"{tower}encoder.blocks.{block}."
        yield TensorSpec(f"{prefix}norm0.weight", "BF16", (width,))
        yield TensorSpec(f"{prefix}norm1.weight", "BF16", (width,))
        yield TensorSpec(f"{prefix}wqkv.weight", "BF16", (3 * vision.qkv_hidden_size, width))
        yield TensorSpec(f"{prefix}wo.weight", "BF16", (width, vision.qkv_hidden_size))
        yield TensorSpec(f"{prefix}mlp.fc0.weight", "BF16", (vision.vt_intermediate_size, width))
        yield TensorSpec(f"{prefix}mlp.fc1.weight", "BF16", (width, vision.vt_intermediate_size))
    yield TensorSpec(f"{tower}encoder.final_layernorm.weight", "BF16", (width,))
    merged = width * math.prod(vision.merge_kernel_size)
    yield TensorSpec("mm_projector.proj.0.weight", "BF16", (merged, merged))
    yield TensorSpec("mm_projector.proj.2.weight", "BF16", (hidden, merged))
    yield TensorSpec("mm_projector.post_norm.weight", "BF16", (hidden,))


def all_tensors(config: KimiK3Config) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint, in the order this product writes them."""
    text = config.text_config
    outer = tuple(outer_tensors(text))
    yield outer[0]
    moe = set(text.moe_layers)
    for layer in range(text.num_hidden_layers):
        yield from layer_tensors(text, layer)
        if layer in moe:
            yield from expert_tensors(text, layer)
    yield from outer[1:]
    if config.vision_config is not None:
        yield from vision_tensors(config.vision_config, text.hidden_size)
