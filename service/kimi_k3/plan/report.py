# SPDX-License-Identifier: Apache-2.0
"""A whole plan, as ``kimi-k3 plan`` writes it: what a start will use, and the command that starts it. Pure.

Numbers are bytes, tokens or seconds. One that cannot be known before a start is ``null``; one that is guessed
from somebody else's run has ``estimated`` in its name.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from kimi_k3 import __version__
from kimi_k3.checkpoint import KimiK3Config
from kimi_k3.plan.budget import Budgets
from kimi_k3.plan.cache import CacheLayout
from kimi_k3.plan.launch import Launch
from kimi_k3.plan.memory import PROCESS_BYTES, MemoryPlan
from kimi_k3.plan.sharding import Parallelism, RankWeights
from kimi_k3.plan.storage import Reading

SCHEMA_VERSION: Final = 1

Count = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PerRank(_Model):
    """Memory of the fullest rank.

    The resident sizes are those of weights; ``gpu_bytes`` is the sum of what follows it, if the plan fits.
    """

    resident_before_conversion_bytes: Count
    resident_after_conversion_bytes: Count
    conversion_peak_bytes: Count
    expert_bytes_before_conversion: Count
    expert_bytes_after_conversion: Count
    sharded_bytes: Count
    replicated_bytes: Count
    vision_bytes: Count
    gpu_bytes: Count | None
    weights_bytes: Count
    process_estimated_bytes: Count | None
    step_estimated_bytes: Count | None
    cache_bytes: Count | None
    withheld_bytes: Count | None


class Cache(_Model):
    """The cache of one rank.

    Attributes:
        bytes_per_token: of the MLA layers.
        state_bytes_per_sequence: of the KDA layers.
        block_tokens: what vLLM allocates at once.
        tokens: that fit if every sequence has ``max_model_len``; what vLLM will log.
        max_model_len: as it will be started.
        largest_max_model_len: what one sequence could have that is alone; more than ``tokens`` if these are
            of several sequences, each of which also takes blocks for its states.
        largest_max_num_seqs: sequences of ``max_model_len`` tokens that fit whole, at the same time.
    """

    bytes_per_token: Count
    state_bytes_per_sequence: Count
    block_tokens: Count
    tokens: Count | None
    max_model_len: Count
    largest_max_model_len: Count | None
    largest_max_num_seqs: Count | None


class Storage(_Model):
    """What is read; ``seconds`` at the bandwidth that was given, from an empty page cache.

    Attributes:
        rank_bytes: that one rank asks for.
        node_bytes: that all ranks of a node ask for.
        distinct_bytes: that the storage delivers if the node's memory keeps what is read twice.
    """

    rank_bytes: Count
    node_bytes: Count
    distinct_bytes: Count
    bytes_per_second: float | None
    seconds_if_cached: float | None
    seconds_if_not_cached: float | None


class Plan(_Model):
    """What a start will use.

    Attributes:
        fits: whether nothing speaks against it.
        startable: whether ``kimi-k3 serve`` can start the profile; a note says why not.
        reasons: what does, one line each.
        notes: what to know of the numbers.
        gpu: null on a CPU.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    version: str = __version__
    fits: bool
    startable: bool
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    profile: str
    weights: str
    gpu: str | None
    nodes: Count
    ranks: Count
    per_rank: PerRank
    kv: Cache
    storage: Storage
    budgets: dict[str, int]
    argv: tuple[str, ...]
    env: dict[str, str]


def per_rank(weights: RankWeights, memory: MemoryPlan | None, *, lossy: bool) -> PerRank:
    """The figures of one rank; ``memory`` is null where there is no GPU."""
    return PerRank(
        resident_before_conversion_bytes=weights.loaded,
        resident_after_conversion_bytes=weights.converted if lossy else weights.loaded,
        conversion_peak_bytes=weights.conversion_peak if lossy else weights.loaded,
        expert_bytes_before_conversion=weights.expert_codes + weights.expert_scales,
        expert_bytes_after_conversion=weights.expert_codes
        + (weights.int4_scales if lossy else weights.expert_scales),
        sharded_bytes=weights.sharded,
        replicated_bytes=weights.replicated,
        vision_bytes=weights.vision,
        gpu_bytes=memory and memory.gpu.memory_bytes,
        weights_bytes=weights.converted if lossy else weights.loaded,
        process_estimated_bytes=None if memory is None else PROCESS_BYTES,
        step_estimated_bytes=memory and memory.step,
        cache_bytes=memory and memory.cache,
        withheld_bytes=memory and memory.withheld,
    )


def cache(layout: CacheLayout, config: KimiK3Config, memory: int | None, max_model_len: int) -> Cache:
    """The figures of the cache in ``memory`` bytes; without them only the layout's."""
    positions = config.text_config.max_position_embeddings
    known = memory is not None and memory > 0
    return Cache(
        bytes_per_token=layout.bytes_per_token,
        state_bytes_per_sequence=layout.state_bytes,
        block_tokens=layout.block_tokens,
        tokens=layout.capacity(memory, max_model_len) if known and memory else None,
        max_model_len=max_model_len,
        largest_max_model_len=min(positions, layout.longest(memory)) if known and memory else None,
        largest_max_num_seqs=layout.sequences(memory, max_model_len) if known and memory else None,
    )


def storage(found: Reading, bytes_per_second: float | None) -> Storage:
    """The figures of reading."""
    return Storage(
        rank_bytes=found.rank,
        node_bytes=found.node,
        distinct_bytes=found.distinct,
        bytes_per_second=bytes_per_second,
        seconds_if_cached=bytes_per_second and found.seconds(bytes_per_second, cached=True),
        seconds_if_not_cached=bytes_per_second and found.seconds(bytes_per_second, cached=False),
    )


def plan_document(
    *,
    profile: str,
    weights: str,
    cut: Parallelism,
    nodes: int,
    gpu: str | None,
    startable: bool,
    reasons: tuple[str, ...],
    notes: tuple[str, ...],
    figures: PerRank,
    kv: Cache,
    read: Storage,
    times: Budgets,
    launch: Launch,
) -> Plan:
    """All parts together."""
    return Plan(
        fits=not reasons,
        startable=startable,
        reasons=reasons,
        notes=notes,
        profile=profile,
        weights=weights,
        gpu=gpu,
        nodes=nodes,
        ranks=cut.ranks,
        per_rank=figures,
        kv=kv,
        storage=read,
        budgets=asdict(times),
        argv=launch.argv,
        env=launch.environment,
    )
