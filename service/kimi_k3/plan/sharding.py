# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a checkpoint each rank holds, as vLLM's Kimi-K3 class for AMD lays them out. Pure.

The rules follow ``vllm/models/kimi_k3/amd`` of 0.32: column- and row-parallel layers are cut by tensor
parallelism, everything else is whole on every rank. A tensor that no rule names is an error: guessing would
make a plan that does not fit look as if it did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kimi_k3.checkpoint import KimiK3Config, TensorSpec, TextConfig
from kimi_k3.checkpoint.layout import (
    TEXT_PREFIX,
    layer_tensors,
    outer_tensors,
    vision_tensors,
)

MIN_INTERMEDIATE_PER_RANK = 256
"""Narrower slices of the routed experts are padded to it (``min_moe_intermediate_per_partition``,
vllm/models/kimi_k3/amd/linear.py)."""

INTERMEDIATE_MULTIPLE = 128
"""To which a slice is rounded up for AITER's MXFP4 kernels with this activation (0.32, oracle/mxfp4.py).
Before vLLM-project/vllm#51274 it was 256, which made 512 of 384."""

GROUP = 32
_CODE_BYTES, _E8M0_BYTES, _BF16_BYTES = GROUP // 2, 1, 2
"""Per group of weights: its codes, its scale in the checkpoint, its scale in int4."""


class Placement(StrEnum):
    """Where a tensor that belongs to no routed expert is."""

    SHARDED = "sharded"
    REPLICATED = "replicated"
    VISION = "vision"


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a deployment is cut into ranks.

    Attributes:
        tensor: ranks that share a layer's matrices.
        pipeline: stages that share the layers.
        data: replicas of the attention; with ``expert`` they share the routed experts.
        expert: whether a rank holds whole routed experts instead of slices of all of them.
        decode_context: ranks that share a sequence's MLA cache.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    decode_context: int = 1

    @property
    def ranks(self) -> int:
        """GPUs of the whole deployment."""
        return self.tensor * self.pipeline * self.data

    @property
    def expert_ranks(self) -> int:
        """Ranks that share a layer's routed experts."""
        return self.tensor * self.data


@dataclass(frozen=True)
class RankWeights:
    """Bytes of one rank's weights.

    Attributes:
        expert_codes: nibbles of the routed experts, the same before and after the conversion.
        expert_scales: their scales as they are loaded, a byte per group.
        int4_scales: their scales after a conversion, two bytes per group.
        largest_scales: those of the largest projection of a layer, as loaded: while it is converted, both
            kinds are there.
        sharded: this rank's part of everything that is cut.
        replicated: what every rank holds whole.
        vision: the image encoder and its projector, whole.
    """

    expert_codes: int
    expert_scales: int
    int4_scales: int
    largest_scales: int
    sharded: int
    replicated: int
    vision: int

    @property
    def loaded(self) -> int:
        """Resident when the checkpoint has been read."""
        return self.expert_codes + self.expert_scales + self.sharded + self.replicated + self.vision

    @property
    def converted(self) -> int:
        """Resident when every projection has been converted in place."""
        return self.loaded - self.expert_scales + self.int4_scales

    @property
    def conversion_peak(self) -> int:
        """Most that is resident on the way: the last projection's old scales go after its new ones came."""
        return max(self.loaded, self.converted + self.largest_scales) + WORKSPACE_BYTES


WORKSPACE_BYTES = 2 * 2**20
"""Of a conversion in place beside the scales; measured, 1.1 MiB (benchmarks/RESULTS.md)."""

_SHARDED = frozenset(
    {
        # Attention, both kinds.
        "q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight", "o_proj.weight",
        "b_proj.weight", "f_b_proj.weight", "q_b_proj.weight", "kv_b_proj.weight",
        "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "A_log", "dt_bias",
        # Dense layers and shared experts.
        "gate_proj.weight", "up_proj.weight", "down_proj.weight",
        "embed_tokens.weight", "lm_head.weight",
    }
)  # fmt: skip
_REPLICATED = frozenset(
    {
        "f_a_proj.weight", "o_norm.weight", "q_a_proj.weight", "q_a_layernorm.weight",
        "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight",
        "input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight",
        "self_attention_res_norm.weight", "self_attention_res_proj.weight",
        "mlp_res_norm.weight", "mlp_res_proj.weight",
        "output_attn_res_norm.weight", "output_attn_res_proj.weight",
        "block_sparse_moe.gate.weight", "gate.e_score_correction_bias",
        "routed_expert_down_proj.weight", "routed_expert_norm.weight",
        # vLLM 0.32 cuts it, earlier ones did not, and every public measurement is of an earlier one. So it
        # counts whole until somebody measures: 3.9 GiB per rank of eight that 0.32 may leave free.
        "routed_expert_up_proj.weight",
    }
)  # fmt: skip


def placement(name: str) -> Placement:
    """Where the tensor called ``name`` is.

    Raises:
        KeyError: no rule names it.
    """
    if not name.startswith(TEXT_PREFIX):
        return Placement.VISION
    last = name.split(".")
    endings = {".".join(last[-count:]) for count in (1, 2, 3)}
    # The longer rules first: a layer's gate is whole, the gate of its dense part is cut.
    if endings & _REPLICATED:
        return Placement.REPLICATED
    if endings & _SHARDED:
        return Placement.SHARDED
    raise KeyError(f"{name}: nobody knows how vLLM places it")


def stages(layers: int, pipeline: int) -> list[range]:
    """The decoder layers of each pipeline stage (``get_pp_indices``, vllm/distributed/utils.py)."""
    sizes = [layers // pipeline] * pipeline
    for back in range(2, layers % pipeline + 2):
        sizes[-back] += 1
    starts = [sum(sizes[:stage]) for stage in range(pipeline)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def padded_intermediate(text: TextConfig, cut: Parallelism, *, multiple: int = INTERMEDIATE_MULTIPLE) -> int:
    """Width of the routed experts on a rank, in elements, with what kernels need beyond the model's."""
    width = text.moe_intermediate_size
    if cut.tensor > 1 and width // cut.tensor < MIN_INTERMEDIATE_PER_RANK:
        width = MIN_INTERMEDIATE_PER_RANK * cut.tensor
    slices = 1 if cut.expert else cut.expert_ranks
    return math.ceil(width / slices / multiple) * multiple


def rank_weights(
    config: KimiK3Config,
    cut: Parallelism,
    *,
    vision: bool = True,
    intermediate_multiple: int = INTERMEDIATE_MULTIPLE,
) -> RankWeights:
    """What the fullest rank holds.

    Args:
        config: the checkpoint's.
        cut: how it is cut into ranks.
        vision: whether the image encoder is loaded (not with ``--language-model-only``).
        intermediate_multiple: see :data:`INTERMEDIATE_MULTIPLE`.
    """
    text = config.text_config
    moe = set(text.moe_layers)
    width = padded_intermediate(text, cut, multiple=intermediate_multiple)
    experts = math.ceil(text.num_experts / cut.expert_ranks) if cut.expert else text.num_experts
    # w1 and w3 are one matrix, w13, twice as large as w2.
    w2_groups = experts * text.expert_hidden * width // GROUP
    found = []
    for stage in stages(text.num_hidden_layers, cut.pipeline):
        bytes_by = dict.fromkeys(Placement, 0)
        for spec in other_tensors(config, stage):
            bytes_by[placement(spec.name)] += spec.nbytes
        groups = 3 * w2_groups * len(moe & set(stage))
        found.append(
            RankWeights(
                expert_codes=groups * _CODE_BYTES,
                expert_scales=groups * _E8M0_BYTES,
                int4_scales=groups * _BF16_BYTES,
                largest_scales=2 * w2_groups * _E8M0_BYTES if groups else 0,
                sharded=math.ceil(bytes_by[Placement.SHARDED] / cut.tensor),
                replicated=bytes_by[Placement.REPLICATED],
                vision=bytes_by[Placement.VISION] if vision else 0,
            )
        )
    return max(found, key=lambda rank: rank.converted)


def other_tensors(config: KimiK3Config, stage: range) -> Iterator[TensorSpec]:
    """All tensors of a pipeline stage that belong to no routed expert."""
    text = config.text_config
    for layer in stage:
        yield from layer_tensors(text, layer)
    first, last = stage.start == 0, stage.stop == text.num_hidden_layers
    for spec in outer_tensors(text):
        if first if "embed_tokens" in spec.name else last:
            yield spec
    if first and config.vision_config is not None:
        yield from vision_tensors(config.vision_config, text.hidden_size)
