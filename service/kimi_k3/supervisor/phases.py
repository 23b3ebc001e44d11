# SPDX-License-Identifier: Apache-2.0
"""Where a start is, from what its ranks reported, what vLLM printed and whether it answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kimi_k3.journal.models import RankRecord
from kimi_k3.words.phases import Phase

LOG_SIGNS: Final = (
    ("Starting to load model", Phase.LOADING),  # v1/worker/gpu_model_runner.py
    ("Loading safetensors checkpoint shards", Phase.LOADING),  # model_loader/weight_utils.py
    ("Loading weights took", Phase.CONVERTING),  # model_loader/default_loader.py
    ("Model loading took", Phase.COMPILING),  # v1/worker/gpu_model_runner.py
    ("Warming up model for the compilation", Phase.COMPILING),  # v1/worker/cpu_model_runner.py
    ("torch.compile took", Phase.COMPILING),  # compilation/monitor.py
    ("Capturing CUDA graph", Phase.CAPTURING),  # v1/worker/gpu/cudagraph_utils.py
    ("Graph capturing finished in", Phase.CAPTURING),  # v1/worker/gpu_model_runner.py
    ("init engine (profile, create kv cache, warmup model) took", Phase.WARMING),  # v1/engine/core.py
    ("Starting vLLM server on", Phase.WARMING),  # entrypoints/launchers/api_server/entry.py
)
"""Text that vLLM 0.32.0 and 0.33.0 print, and the phase in which a start is once it is printed."""


def sign_of(line: str) -> Phase | None:
    """The phase that a line of vLLM's log announces, if it does."""
    return next((phase for text, phase in LOG_SIGNS if text in line), None)


def latest(*phases: Phase | None) -> Phase:
    """The phase furthest along; ``PENDING`` of none."""
    known = [phase for phase in phases if phase is not None]
    return max(known, key=lambda phase: phase.position, default=Phase.PENDING)


def starting_phase(
    present: Phase,
    *,
    ranks: Sequence[RankRecord],
    world_size: int,
    expected_conversions: int,
    log: Phase | None,
    healthy: bool,
) -> Phase:
    """The phase of a start that does not serve yet; never one before ``present``.

    All ranks load together and go on together, so the slowest rank is where the start is. One
    rank's "Model loading took" therefore does not end the conversion while another still converts.

    Args:
        present: the phase so far.
        ranks: records of this start.
        expected_conversions: how many each rank will report.
        log: the furthest phase that the log announced.
        healthy: whether ``/health`` answered 200.
    """
    if healthy:
        return latest(present, Phase.WARMING)
    found = latest(log, _slowest(ranks, world_size))
    converting = any(len(rank.conversions) < expected_conversions for rank in ranks)
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
