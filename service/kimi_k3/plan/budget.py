# SPDX-License-Identifier: Apache-2.0
"""Time budgets: everything follows from the start timeout, the readiness delay and the drain timeout."""

from __future__ import annotations

import math
from dataclasses import dataclass

READY_TIMEOUT_MARGIN_SECONDS = 60
"""vLLM's own ready timeout lies this much above ours, so that the message that names the phase wins."""

TEARDOWN_SECONDS = 20
"""From the end of draining to the engine's exit: vLLM allows its processes 15 s on ROCm
(``ROCM_ENGINE_PROCESS_SHUTDOWN_TIMEOUT_S``, vllm/v1/engine/utils.py); killing earlier can leave
device memory taken."""

PROBE_MARGIN_SECONDS = 60
"""A probe gives up this much after vLLM's own ready timeout, so that there is a message to read."""

EXECUTE_MODEL_SECONDS = (300, 1800)
"""Least and most of ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``: vLLM's default, and twice the quarter of an hour
that a first long request compiled (ROCm/MAD, MI300X)."""

HANG_MARGIN_SECONDS = 60
"""An engine counts as hung this much after vLLM's own limit for one step, whose message knows more."""


@dataclass(frozen=True)
class Budgets:
    """Seconds, each for one who waits.

    Attributes:
        startup: until ready; the number that all others of a start follow.
        engine_ready: vLLM's own, ``VLLM_ENGINE_READY_TIMEOUT_S``.
        startup_probe: of an orchestrator's probe.
        progress_deadline: of its rollout.
        execute_model: one step of the model, ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``.
        readiness_delay: from "not ready" to the engine's SIGTERM. The supervisor waits it; whoever also
            sleeps in a preStop hook waits twice.
        drain: to finish requests.
        teardown: of the engine's processes.
        hang: without progress while requests run, until the engine is ended.
        termination_grace: from the order to stop until SIGKILL.
    """

    startup: int
    engine_ready: int
    startup_probe: int
    progress_deadline: int
    execute_model: int
    readiness_delay: int
    drain: int
    teardown: int
    hang: int
    termination_grace: int


def budgets(start_timeout: float, drain_timeout: float, readiness_delay: float) -> Budgets:
    """All budgets of a deployment."""
    engine_ready = engine_ready_timeout_seconds(start_timeout)
    probe = engine_ready + PROBE_MARGIN_SECONDS
    drain = engine_shutdown_timeout_seconds(drain_timeout)
    delay = math.ceil(readiness_delay)
    return Budgets(
        startup=math.ceil(start_timeout),
        engine_ready=engine_ready,
        startup_probe=probe,
        progress_deadline=probe + PROBE_MARGIN_SECONDS,
        execute_model=execute_model_timeout_seconds(start_timeout),
        readiness_delay=delay,
        drain=drain,
        teardown=TEARDOWN_SECONDS,
        hang=hang_timeout_seconds(start_timeout),
        termination_grace=delay + drain + TEARDOWN_SECONDS,
    )


def execute_model_timeout_seconds(start_timeout: float) -> int:
    """``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``: a quarter of a start, since both may wait for compilers."""
    least, most = EXECUTE_MODEL_SECONDS
    return min(most, max(least, math.ceil(start_timeout / 4)))


def hang_timeout_seconds(start_timeout: float) -> int:
    """Seconds without progress while requests run, until the engine is ended as hung.

    Longer than any step may take: a first long request compiles kernels in it.
    """
    return execute_model_timeout_seconds(start_timeout) + HANG_MARGIN_SECONDS


def engine_ready_timeout_seconds(start_timeout: float) -> int:
    """``VLLM_ENGINE_READY_TIMEOUT_S`` for a start that may take ``start_timeout`` seconds.

    vLLM's default of 600 s ends a start that is still loading weights (vllm-project/vllm#48031).
    """
    return math.ceil(start_timeout) + READY_TIMEOUT_MARGIN_SECONDS


def engine_shutdown_timeout_seconds(drain_timeout: float) -> int:
    """``--shutdown-timeout``: whole seconds in which vLLM finishes requests after SIGTERM; 0 aborts them."""
    return math.ceil(drain_timeout)


def exit_deadline_seconds(drain_timeout: float, *, serving: bool) -> float:
    """Seconds from the engine's SIGTERM until its processes are ended by force.

    An engine that does not serve yet has nothing to drain. The readiness delay comes before.
    """
    return (drain_timeout if serving else 0.0) + TEARDOWN_SECONDS
