# SPDX-License-Identifier: Apache-2.0
"""Where a start is, from what its ranks reported, what vLLM printed and whether it answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kimi_k3.journal.models import RankRecord
from kimi_k3.words.phases import Phase


@dataclass(frozen=True)
class Sign:
    """A text that vLLM prints, and what it says of a start.

    Attributes:
        text: part of a line of 0.32.0 and of 0.33.0.
        phase: in which a start is once it is printed.
        step: what is done from then on within the phase, in a few words; ``None`` if that is not known.
    """

    text: str
    phase: Phase
    step: str | None = None


_PROFILING = "profiling memory"

LOG_SIGNS: Final = (
    Sign("Starting to load model", Phase.LOADING, "building the model"),  # v1/worker/gpu_model_runner.py
    Sign("kimi-k3: canary: asking", Phase.LOADING, "proving the experts' kernels"),  # engine/choice.py
    Sign(
        "Loading safetensors checkpoint shards", Phase.LOADING, "reading shards"
    ),  # model_loader/weight_utils.py
    Sign("Loading weights took", Phase.CONVERTING),  # model_loader/default_loader.py
    Sign("Model loading took", Phase.COMPILING, _PROFILING),  # v1/worker/gpu_model_runner.py
    Sign(
        "Warming up model for the compilation", Phase.COMPILING, "compiling"
    ),  # v1/worker/cpu_model_runner.py
    Sign("Dynamo bytecode transform time", Phase.COMPILING, "compiling"),  # compilation/backends.py
    Sign("torch.compile took", Phase.COMPILING, _PROFILING),  # compilation/monitor.py
    Sign("Profiling CUDA graph memory", Phase.COMPILING, "measuring graphs"),  # v1/worker/gpu_model_runner.py
    Sign("Available KV cache memory", Phase.COMPILING, "laying out the KV cache"),  # v1/worker/gpu_worker.py
    Sign("Compile and warming up model for size", Phase.COMPILING, "compiling"),  # v1/worker/gpu_worker.py
    Sign("Capturing CUDA graph", Phase.CAPTURING),  # v1/worker/gpu/cudagraph_utils.py
    Sign(
        "Graph capturing finished in", Phase.CAPTURING, "warming up kernels"
    ),  # v1/worker/gpu_model_runner.py
    Sign(
        "init engine (profile, create kv cache, warmup model) took", Phase.WARMING, "starting the API server"
    ),  # v1/engine/core.py
    Sign(
        "Starting vLLM server on", Phase.WARMING, "waiting for the first completion"
    ),  # entrypoints/launchers/api_server/entry.py
)
"""In the order of a start."""

_SHUTDOWN = re.compile(r"\[shutdown\] (?:Executor|EngineCore|MPClient):")
# v1/executor/multiproc_executor.py, v1/engine/core.py, v1/engine/core_client.py
_BAR = re.compile(r"Capturing CUDA graphs(?: \(([^)]{1,80})\))?:\s+\d{1,3}%\|[^|]*\|\s*(\d{1,6})/(\d{1,6})\b")
"""A progress bar of tqdm: one for each kind of graph, one after the other."""


_CACHE = re.compile(r"Available KV cache memory: ([\d,]{1,9}(?:\.\d{1,6})?) GiB")
"""v1/worker/gpu_worker.py."""


def sign_of(line: str) -> Sign | None:
    """What a line of vLLM's log announces, if it does."""
    return next((sign for sign in LOG_SIGNS if sign.text in line), None)


def shuts_down(line: str) -> bool:
    """Whether vLLM tells that it ends its core or its workers, by itself or because it was asked to."""
    return _SHUTDOWN.search(line) is not None


def bar_of(line: str) -> tuple[str, int, int] | None:
    """Of a progress bar of the graph capture: which graphs, how many are captured, how many there will be."""
    match = _BAR.search(line)
    return None if match is None else (match[1] or "graphs", int(match[2]), int(match[3]))


def cache_of(line: str) -> int | None:
    """The bytes that a worker announces for its KV cache, if the line does so."""
    match = _CACHE.search(line)
    return None if match is None else int(float(match[1].replace(",", "")) * 2**30)


def latest(*phases: Phase | None) -> Phase:
    """The phase furthest along; ``PENDING`` of none."""
    known = [phase for phase in phases if phase is not None]
    return max(known, key=lambda phase: phase.position, default=Phase.PENDING)


def starting_phase(
    present: Phase,
    *,
    ranks: Sequence[RankRecord],
    world_size: int,
    expected_conversions: Callable[[int], int],
    log: Phase | None,
    healthy: bool,
) -> Phase:
    """The phase of a start that does not serve yet; never one before ``present``.

    All ranks load together and go on together, so the slowest rank is where the start is. One
    rank's "Model loading took" therefore does not end the conversion while another still converts.

    Args:
        present: the phase so far.
        ranks: records of this start.
        world_size: how many there will be.
        expected_conversions: how many a rank will report.
        log: the furthest phase that the log announced.
        healthy: whether ``/health`` answered 200, or the first node says that it did.
    """
    if healthy:
        return latest(present, Phase.WARMING)
    found = latest(log, _slowest(ranks, world_size))
    converting = any(len(rank.conversions) < expected_conversions(rank.rank) for rank in ranks)
    if converting and found.position > Phase.CONVERTING.position:
        found = Phase.CONVERTING
    return latest(present, found)


def _slowest(ranks: Sequence[RankRecord], world_size: int) -> Phase | None:
    phases = [rank.phase or Phase.LOADING for rank in ranks]
    if not phases:
        return None
    if len(phases) < world_size:
        return Phase.LOADING
    return min(phases, key=lambda phase: phase.position)
