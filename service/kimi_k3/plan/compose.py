# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint's config and a deployment to its plan. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kimi_k3.checkpoint import KimiK3Config
from kimi_k3.plan.budget import Budgets, budgets
from kimi_k3.plan.cache import CacheLayout, cache_layout
from kimi_k3.plan.launch import Deployment, Launch, profile_flags
from kimi_k3.plan.memory import PROCESS_BYTES, MemoryPlan, attention_workspace_bytes, gib, plan_memory
from kimi_k3.plan.overrides import WHY
from kimi_k3.plan.report import Plan, Storage, cache, per_rank, plan_document, storage
from kimi_k3.plan.sharding import Parallelism, RankWeights, rank_weights
from kimi_k3.plan.storage import reading
from kimi_k3.profiles.schema import Profile
from kimi_k3.words.gpus import GIB, GPUS, Gpu

Flags = Mapping[str, str | None]

EXPERT_FILTER, TEXT_ONLY, PREFIX_CACHING = (
    "--enable-ep-weight-filter",
    "--language-model-only",
    "--enable-prefix-caching",
)
CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"

ELEMENT_BYTES = {"float32": 4, "float": 4}
"""Of a cache's numbers, by ``--dtype``; 2 for every other one, and 1 with ``--kv-cache-dtype fp8``."""

ESTIMATES = (
    "what a process and a step take is estimated from one public run of TP8 on 8 x MI325X "
    "(vllm-project/vllm#51274), to whose 948,305 tokens of cache it is fitted"
)
NOT_STARTABLE = "kimi-k3 serve cannot start profile {} yet: it {}"
OTHER_REASONS = (
    "the reasons beside flags are the profile's own, and their figures hold for {} and for its own sizes: "
    "the figures of this start are those above"
)
SEVERAL_NODES = (
    "this is node {node} of {nodes}; each starts with its own --node-rank and with --leader-address, which "
    "is {leader} here"
)
UP_PROJECTION = (
    "vLLM 0.32 cuts routed_expert_up_proj among the ranks, which nobody has published a measurement of; it "
    "counts here as whole on every rank, {} more than vLLM may need"
)
DRAFT = "the draft model, a second checkpoint, is neither in the command nor counted"
CONSENT = "int4 is lossy: a start needs --accept-lossy (or KIMI_K3_ACCEPT_LOSSY=1)"


def compose(
    config: KimiK3Config,
    deployment: Deployment,
    launch: Launch,
    gpu: Gpu | None,
    *,
    host_bytes: int | None = None,
    total_bytes: int | None = None,
    bytes_per_second: float | None = None,
    others: Iterable[Profile] = (),
) -> Plan:
    """The plan of one start.

    Args:
        config: the checkpoint's.
        deployment: the start, every value decided.
        launch: its argv and environment.
        gpu: what it runs on; ``None`` on a CPU.
        host_bytes: memory of the machine, if it is to hold the weights.
        total_bytes: of the checkpoint, if its index is there.
        bytes_per_second: of the storage, if known.
        others: profiles, to name one that fits if this one does not.
    """
    profile, lossy = deployment.profile, deployment.weights.lossy
    cut, flags = parallelism(profile), profile_flags(deployment)
    weights, layout = _rank(config, cut, flags)
    memory = None if gpu is None else _memory(config, gpu, cut, flags, lossy=lossy)
    left = memory.cache if memory is not None else _cpu_cache(launch)
    times = budgets(deployment.start_timeout, deployment.drain_timeout, deployment.readiness_delay)
    read = storage(
        reading(
            config,
            cut,
            ranks_per_node=cut.ranks // profile.nodes,
            expert_filter=EXPERT_FILTER in flags,
            total_bytes=total_bytes,
        ),
        bytes_per_second,
    )
    reasons = [
        *(_unfit_for(profile, memory) if memory is not None else ()),
        *(_instead(config, profile, memory, others) if memory is not None else ()),
        *_too_much_for_host(weights.loaded + (left or 0), host_bytes),
        *_too_slow(read, times),
    ]
    return plan_document(
        profile=profile.name,
        weights=deployment.weights.value,
        cut=cut,
        nodes=profile.nodes,
        gpu=None if gpu is None else gpu.name,
        reasons=tuple(reasons),
        startable=profile.not_startable is None,
        notes=tuple(_notes(config, deployment, cut, gpu)),
        figures=per_rank(weights, memory, lossy=lossy),
        kv=cache(layout, config, left, _max_model_len(config, flags)),
        read=read,
        times=times,
        launch=launch,
    )


def _unfit_for(profile: Profile, memory: MemoryPlan) -> Iterator[str]:
    gpu = memory.gpu
    if profile.gpu is not None and gpu.architecture != profile.gpu.architecture:
        yield f"profile {profile.name} is for {profile.gpu.architecture}, {gpu.name} is {gpu.architecture}"
    yield from memory.reasons


def _too_much_for_host(least: int, host_bytes: int | None) -> Iterator[str]:
    if host_bytes is not None and least > host_bytes:
        yield f"weights and cache take at least {gib(least)}, this machine has {gib(host_bytes)}"


def _too_slow(read: Storage, times: Budgets) -> Iterator[str]:
    if read.seconds_if_cached is not None and read.seconds_if_cached > times.startup:
        yield (
            f"reading alone takes {math.ceil(read.seconds_if_cached)} s at "
            f"{(read.bytes_per_second or 0) / 1e9:g} GB/s, a start may take {times.startup} s: "
            "more than that with --set start-timeout=N"
        )


def _notes(config: KimiK3Config, deployment: Deployment, cut: Parallelism, gpu: Gpu | None) -> Iterator[str]:
    profile = deployment.profile
    if profile.not_startable is not None:
        yield NOT_STARTABLE.format(profile.name, profile.not_startable)
    usual = usual_gpu(profile)
    if gpu != usual or profile.sizes_why == WHY:
        yield OTHER_REASONS.format("a CPU" if usual is None else usual.name)
    if profile.gpu is not None:
        yield ESTIMATES
    if profile.needs_draft:
        yield DRAFT
    if (place := deployment.place) is not None:
        yield SEVERAL_NODES.format(node=place.node, nodes=place.nodes, leader=place.leader)
    if cut.tensor > 1 and config.text_config.routed_expert_hidden_size is not None:
        yield UP_PROJECTION.format(gib(_up_projection(config, cut)))
    if deployment.weights.lossy and deployment.consent is None:
        yield CONSENT


def parallelism(profile: Profile) -> Parallelism:
    """How a profile's deployment is cut into ranks."""
    return Parallelism(
        tensor=profile.tensor_parallel_size,
        pipeline=profile.pipeline_parallel_size,
        data=profile.data_parallel_size,
        expert=profile.expert_parallel,
        decode_context=profile.decode_context_parallel_size,
    )


def usual_gpu(profile: Profile) -> Gpu | None:
    """The smallest GPU that a profile is for; ``None`` on a CPU.

    Raises:
        KeyError: it is for one that this product does not know.
    """
    if profile.gpu is None:
        return None
    fitting = fitting_gpus(profile)
    if not fitting:
        raise KeyError(f"profile {profile.name}: no known GPU has {profile.gpu.memory_gib} GiB")
    return min(fitting, key=lambda gpu: gpu.memory_bytes)


def fitting_gpus(profile: Profile) -> list[Gpu]:
    """The GPUs on which a profile can run; none for one that runs on a CPU."""
    wanted = profile.gpu
    if wanted is None:
        return []
    return [
        gpu
        for gpu in GPUS.values()
        if gpu.architecture == wanted.architecture and gpu.memory_bytes >= (wanted.memory_gib - 1) * GIB
    ]


def _rank(config: KimiK3Config, cut: Parallelism, flags: Flags) -> tuple[RankWeights, CacheLayout]:
    return (
        rank_weights(config, cut, vision=TEXT_ONLY not in flags),
        cache_layout(
            config.text_config,
            cut,
            element_bytes=_element_bytes(flags),
            prefix_caching=PREFIX_CACHING in flags,
            block_tokens=int(flags.get("--block-size") or 0),
        ),
    )


def _element_bytes(flags: Flags) -> int:
    if (flags.get("--kv-cache-dtype") or "auto").startswith("fp8"):
        return 1
    return ELEMENT_BYTES.get(flags.get("--dtype") or "auto", 2)


def _memory(config: KimiK3Config, gpu: Gpu, cut: Parallelism, flags: Flags, *, lossy: bool) -> MemoryPlan:
    weights, layout = _rank(config, cut, flags)
    longest = int(flags["--max-model-len"] or 0)
    asked = flags.get("--kv-cache-memory-bytes")
    return plan_memory(
        gpu,
        weights,
        layout,
        lossy=lossy,
        utilization=float(flags["--gpu-memory-utilization"] or 0),
        max_model_len=longest,
        max_num_batched_tokens=int(flags["--max-num-batched-tokens"] or 0),
        workspace=attention_workspace_bytes(
            config.text_config,
            cut,
            gpu,
            max_num_seqs=int(flags["--max-num-seqs"] or 0),
            max_model_len=longest,
        ),
        cache_bytes=None if asked is None else int(float(asked)),
    )


def _instead(
    config: KimiK3Config, profile: Profile, memory: MemoryPlan, others: Iterable[Profile]
) -> list[str]:
    """If the weights alone are too much, a line for the simplest other profile that fits the same GPUs."""
    gpu = memory.gpu
    if memory.peak + PROCESS_BYTES <= gpu.memory_bytes:
        return []
    for other in sorted(others, key=lambda one: (one.nodes, one.data_parallel_size, one.name)):
        if other.gpu is None or other.gpu.architecture != gpu.architecture or other.needs_draft:
            continue
        if other.name == profile.name or other.weights is not profile.weights:
            continue
        cut = parallelism(other)
        flags = {name: None if flag.value is None else str(flag.value) for name, flag in other.flags.items()}
        found = _memory(config, gpu, cut, flags, lossy=other.weights.lossy)
        if found.fits:
            return [
                f"--profile {other.name} fits: at most {gib(found.peak)} of weights on each of "
                f"{cut.ranks} x {gpu.name}"
            ]
    return []


def planned_rank(config: KimiK3Config, deployment: Deployment, launch: Launch) -> PlannedRank:
    """What a start gives each rank, on the smallest GPU that its profile is for."""
    cut, flags, lossy = parallelism(deployment.profile), profile_flags(deployment), deployment.weights.lossy
    gpu = usual_gpu(deployment.profile)
    if gpu is not None:
        memory = _memory(config, gpu, cut, flags, lossy=lossy)
        return PlannedRank(memory.resident, memory.peak, memory.step, memory.cache, gpu.memory_bytes)
    weights, _ = _rank(config, cut, flags)
    resident = weights.converted if lossy else weights.loaded
    peak = weights.conversion_peak if lossy else weights.loaded
    return PlannedRank(resident, peak, None, _cpu_cache(launch), None)


class PlannedRank(NamedTuple):
    """Bytes of one rank; ``None`` where the plan does not say."""

    resident: int
    peak: int
    step: int | None
    cache: int | None
    limit: int | None


def _up_projection(config: KimiK3Config, cut: Parallelism) -> int:
    text = config.text_config
    whole = text.hidden_size * text.expert_hidden * 2 * len(text.moe_layers) // cut.pipeline
    return whole - whole // cut.tensor


def _max_model_len(config: KimiK3Config, flags: Flags) -> int:
    return int(flags.get("--max-model-len") or config.text_config.max_position_embeddings)


def _cpu_cache(launch: Launch) -> int | None:
    space = launch.environment.get(CPU_CACHE_VARIABLE)
    return None if space is None else int(float(space) * GIB)
