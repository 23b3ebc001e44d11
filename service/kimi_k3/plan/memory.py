# SPDX-License-Identifier: Apache-2.0
"""Whether a deployment fits into a GPU's memory, and what is left for the cache. Pure.

Weights and cache are computed. What a process takes beside them, nobody can compute without running it: the
two constants here come from one public run and are said to be estimates wherever they appear.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimi_k3.plan.cache import CacheLayout
from kimi_k3.plan.sharding import RankWeights
from kimi_k3.words.gpus import GIB, Gpu

CONTEXT_BYTES = int(4.86 * GIB)
"""Of a process before it profiles: HIP context, code objects, RCCL. vllm-project/vllm#51274, 8 x MI325X, TP8:
58.61 GiB were free beside 192.51 GiB of weights."""

MEASURED_TRANSIENT_BYTES = int(12.41 * GIB)
MEASURED_BATCHED_TOKENS = 16384
"""Peak of the profiling run beyond weights and context, graphs included: what the same run, at 0.97 and with
948,305 tokens of cache, must have had. 16,384 is vLLM 0.32's ``--max-num-batched-tokens`` for GPUs of that
size; the run does not say that it set another."""

FIXED_TRANSIENT_BYTES = 2 * GIB
"""The part of it that does not grow with the tokens of a step: the sampler's and logits' buffers of 1024
sequences (three times 1024 x 163,840 float32), rounded."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """One rank's memory, in bytes; what does not fit is said in ``reasons``.

    Attributes:
        gpu: the kind of GPU.
        weights: what the rank holds.
        lossy: whether the weights are converted.
        layout: of the cache.
        utilization: part of the memory that vLLM may take.
        transient: estimated peak of a step.
        cache: left for the cache; 0 if nothing is.
        max_model_len: tokens of the longest sequence that is asked for.
        reasons: why it does not fit, one line each; empty if it does.
    """

    gpu: Gpu
    weights: RankWeights
    lossy: bool
    layout: CacheLayout
    utilization: float
    transient: int
    cache: int
    max_model_len: int
    reasons: tuple[str, ...]

    @property
    def resident(self) -> int:
        """Weights that stay."""
        return self.weights.converted if self.lossy else self.weights.loaded

    @property
    def peak(self) -> int:
        """Most of the weights that is there while they are loaded and converted."""
        return self.weights.conversion_peak if self.lossy else self.weights.loaded

    @property
    def withheld(self) -> int:
        """What vLLM leaves alone, for others."""
        return self.gpu.memory_bytes - int(self.gpu.memory_bytes * self.utilization)

    @property
    def fits(self) -> bool:
        """Whether there is no reason against it."""
        return not self.reasons


def plan_memory(
    gpu: Gpu,
    weights: RankWeights,
    layout: CacheLayout,
    *,
    lossy: bool,
    utilization: float,
    max_model_len: int,
    max_num_batched_tokens: int,
    cache_bytes: int | None = None,
) -> MemoryPlan:
    """Weights, context, a step's peak, and the rest for the cache.

    Args:
        gpu: the kind of GPU.
        weights: of the fullest rank.
        layout: of its cache.
        lossy: whether the weights are converted.
        utilization: ``--gpu-memory-utilization``.
        max_model_len: tokens of the longest sequence.
        max_num_batched_tokens: of a step.
        cache_bytes: ``--kv-cache-memory-bytes``, which takes the place of what is left.
    """
    transient = transient_bytes(max_num_batched_tokens)
    resident = weights.converted if lossy else weights.loaded
    allowed = int(gpu.memory_bytes * utilization)
    left = allowed - CONTEXT_BYTES - resident - transient
    cache = max(0, left) if cache_bytes is None else cache_bytes
    peak = weights.conversion_peak if lossy else weights.loaded
    reasons = []
    if peak + CONTEXT_BYTES > gpu.memory_bytes:
        reasons.append(
            f"weights take up to {gib(peak)} and the process about {gib(CONTEXT_BYTES)}, "
            f"a {gpu.name} has {gib(gpu.memory_bytes)}"
        )
    elif left < cache or not cache:
        taken = CONTEXT_BYTES + resident + transient + (cache_bytes or 0)
        reasons.append(
            f"weights ({gib(resident)}), process (about {gib(CONTEXT_BYTES)}) and a step of "
            f"{max_num_batched_tokens} tokens (about {gib(transient)})"
            + (f" and {gib(cache)} of cache" if cache else " leave nothing for the cache:")
            + f" need {gib(taken)}, {gib(allowed)} are allowed ({utilization:g} of {gib(gpu.memory_bytes)})"
        )
    elif layout.longest(cache) < max_model_len:
        needed = layout.blocks(max_model_len) * layout.block_bytes
        reasons.append(
            f"a sequence of {max_model_len} tokens needs {gib(needed)} of cache, "
            f"{gib(cache)} are left, enough for {layout.longest(cache)} tokens"
        )
    return MemoryPlan(
        gpu=gpu,
        weights=weights,
        lossy=lossy,
        layout=layout,
        utilization=utilization,
        transient=transient,
        cache=cache if not reasons or layout.pool(cache) else 0,
        max_model_len=max_model_len,
        reasons=tuple(reasons),
    )


def transient_bytes(max_num_batched_tokens: int) -> int:
    """Estimated peak of a step of so many tokens: one measured point, and a fixed part."""
    grows = MEASURED_TRANSIENT_BYTES - FIXED_TRANSIENT_BYTES
    return FIXED_TRANSIENT_BYTES + grows * max_num_batched_tokens // MEASURED_BATCHED_TOKENS


def gib(size: int) -> str:
    """A size for a sentence."""
    return f"{size / GIB:.1f} GiB"
