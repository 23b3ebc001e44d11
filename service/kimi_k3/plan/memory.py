# SPDX-License-Identifier: Apache-2.0
"""Whether a deployment fits into a GPU's memory, and what is left for the cache. Pure.

Weights and cache are computed. What a process takes beside them, nobody can compute without running it: the
two constants here come from one public run and are said to be estimates wherever they appear.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimi_k3.checkpoint import TextConfig
from kimi_k3.plan.cache import CacheLayout
from kimi_k3.plan.sharding import Parallelism, RankWeights
from kimi_k3.words.gpus import GIB, Gpu

PROCESS_BYTES = int(5.56 * GIB)
"""Of a process beside the checkpoint's tensors, before it profiles: HIP context, code objects, RCCL, and what
layers make of their weights when they are loaded. vllm-project/vllm#51274, 8 x MI325X, TP8: 58.61 GiB were
free when the tensors, 191.81 GiB, had been loaded."""

STEP_BYTES = int(12.41 * GIB)
STEP_TOKENS = 16384
"""Peak of the profiling run beyond that, graphs included: what the same run, at 0.97 and with 948,305 tokens
of cache, must have had. 16,384 is vLLM 0.32's ``--max-num-batched-tokens`` for GPUs of that size; the run
does not say that it set another. For steps of fewer tokens nobody has shown that it is less."""

MLA_PIECE_TOKENS, MLA_PIECES_PER_COMPUTE_UNIT = 512, 2
"""``_MIN_WORK_PER_SPLIT``, ``_SPLIT_OCCUPANCY_MULTIPLIER`` (vllm/v1/attention/backends/mla/triton_mla.py)."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """One rank's memory, in bytes; what does not fit is said in ``reasons``.

    Attributes:
        gpu: the kind of GPU.
        weights: what the rank holds.
        lossy: whether the weights are converted.
        layout: of the cache.
        utilization: part of the memory that vLLM may take.
        step: estimated peak of a step.
        cache: left for the cache; 0 if nothing is.
        max_model_len: tokens of the longest sequence that is asked for.
        reasons: why it does not fit, one line each; empty if it does.
    """

    gpu: Gpu
    weights: RankWeights
    lossy: bool
    layout: CacheLayout
    utilization: float
    step: int
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
        """What is left to others: what vLLM may not take, and what it does not."""
        return max(0, self.gpu.memory_bytes - PROCESS_BYTES - self.resident - self.step - self.cache)

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
    workspace: int = 0,
    cache_bytes: int | None = None,
) -> MemoryPlan:
    """Weights, process, a step's peak, and the rest for the cache.

    Args:
        gpu: the kind of GPU.
        weights: of the fullest rank.
        layout: of its cache.
        lossy: whether the weights are converted.
        utilization: ``--gpu-memory-utilization``.
        max_model_len: tokens of the longest sequence.
        max_num_batched_tokens: of a step.
        workspace: of the attention, see :func:`attention_workspace_bytes`.
        cache_bytes: ``--kv-cache-memory-bytes``, which takes the place of what is left.
    """
    step = step_bytes(max_num_batched_tokens) + workspace
    resident = weights.converted if lossy else weights.loaded
    allowed = int(gpu.memory_bytes * utilization)
    left = allowed - PROCESS_BYTES - resident - step
    cache = max(0, left) if cache_bytes is None else cache_bytes
    peak = weights.conversion_peak if lossy else weights.loaded
    reasons = []
    if peak + PROCESS_BYTES > gpu.memory_bytes:
        reasons.append(
            f"weights take up to {gib(peak)} and the process about {gib(PROCESS_BYTES)}, "
            f"a {gpu.name} has {gib(gpu.memory_bytes)}"
        )
    elif left < cache or not cache:
        taken = PROCESS_BYTES + resident + step + (cache_bytes or 0)
        reasons.append(
            f"weights ({gib(resident)}), process (about {gib(PROCESS_BYTES)}) and a step of "
            f"{max_num_batched_tokens} tokens (about {gib(step)})"
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
        step=step,
        cache=0 if left < cache else cache,
        max_model_len=max_model_len,
        reasons=tuple(reasons),
    )


def step_bytes(max_num_batched_tokens: int) -> int:
    """Estimated peak of a step: the one measured point, and in proportion above it."""
    return STEP_BYTES * max(max_num_batched_tokens, STEP_TOKENS) // STEP_TOKENS


def attention_workspace_bytes(
    text: TextConfig, cut: Parallelism, gpu: Gpu, *, max_num_seqs: int, max_model_len: int
) -> int:
    """What Triton's MLA reserves for partial results (``_reserve_attn_logits_workspace``, vLLM 0.32).

    A float32 row of the latent width and its sum for every sequence, head and piece of the context; pieces
    are a power of two of 512 tokens each, at most two per compute unit. Some of it is in :data:`STEP_BYTES`
    already; how much, the run does not say.
    """
    pieces = 1 << (max(1, max_model_len // MLA_PIECE_TOKENS) - 1).bit_length()
    pieces = min(pieces, MLA_PIECES_PER_COMPUTE_UNIT * gpu.compute_units)
    heads = text.num_attention_heads // cut.tensor * cut.decode_context
    return max_num_seqs * heads * pieces * (text.kv_lora_rank + 1) * 4


def gib(size: int, digits: int = 1) -> str:
    """A size for a sentence, in GiB or, below one, in the unit that leaves something of it."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.{digits}f} {unit}"
    return f"{size} bytes"
