# SPDX-License-Identifier: Apache-2.0
"""How many bytes a start reads, and how long that takes. Pure.

A rank reads whole tensors of whole files: safetensors maps a file, and a slice of a matrix's columns lies in
every page of it. So without a filter each rank touches the whole checkpoint, and only the page cache keeps
the storage from being read once per rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kimi_k3.checkpoint import KimiK3Config, expert_shape
from kimi_k3.plan.sharding import Parallelism, other_tensors


@dataclass(frozen=True)
class Reading:
    """What is read from storage.

    Attributes:
        rank: bytes that one rank reads.
        node: bytes that all ranks of a node read together.
        distinct: bytes of the files that a node needs: what its storage delivers if the page cache keeps
            everything that is read twice.
    """

    rank: int
    node: int
    distinct: int

    def seconds(self, bytes_per_second: float, *, cached: bool) -> float:
        """Time to read at a bandwidth.

        Args:
            bytes_per_second: of the node's storage.
            cached: whether the node's memory keeps what is read twice.
        """
        return (self.distinct if cached else self.node) / bytes_per_second


def reading(
    config: KimiK3Config,
    cut: Parallelism,
    *,
    ranks_per_node: int,
    expert_filter: bool,
    total_bytes: int | None = None,
) -> Reading:
    """What a start reads.

    Args:
        config: the checkpoint's.
        cut: how it is cut into ranks.
        ranks_per_node: GPUs of a node.
        expert_filter: ``--enable-ep-weight-filter``: a rank skips the codes of experts that it does not hold
            (not their scales; vllm/model_executor/model_loader/ep_weight_filter.py).
        total_bytes: of the checkpoint, as its index says; else of the tensors that its config calls for.
    """
    text = config.text_config
    expert, count = expert_shape(text), text.num_experts * len(text.moe_layers)
    codes = (shape for (_, part), (_, shape) in expert.specs.items() if part == "weight_packed")
    packed = count * sum(map(math.prod, codes))
    others = sum(spec.nbytes for spec in other_tensors(config, range(text.num_hidden_layers)))
    total = count * expert.nbytes + others if total_bytes is None else total_bytes
    filtered = cut.expert and expert_filter
    shares = cut.expert_ranks if filtered else 1
    rank = total - packed + packed // shares
    here = min(ranks_per_node, cut.ranks)
    return Reading(
        rank=rank,
        node=rank * here,
        distinct=total - packed + packed * min(here, shares) // shares,
    )
