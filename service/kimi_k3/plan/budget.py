# SPDX-License-Identifier: Apache-2.0
"""Time budgets: everything follows from the start timeout and the drain timeout."""

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

PRE_STOP_SECONDS = 10
"""From "not ready" to SIGTERM: what endpoints and gateways need to hear of it (vllm-project/vllm#24885)."""

EXECUTE_MODEL_SECONDS = (300, 1800)
"""Least and most of ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``: vLLM's default, and twice the quarter of an hour
that a first long request compiled (ROCm/MAD, MI300X)."""


@dataclass(frozen=True)
class Budgets:
    """Seconds, each for one who waits.

    Attributes:
        startup: until ready; the number that all others of a start follow.
        engine_ready: vLLM's own, ``VLLM_ENGINE_READY_TIMEOUT_S``.
        startup_probe: of an orchestrator's probe.
        progress_deadline: of its rollout.
        execute_model: one step of the model, ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``.
        pre_stop: before SIGTERM.
        drain: to finish requests.
        teardown: of the engine's processes.
        termination_grace: from the order to stop until SIGKILL.
    """

    startup: int
    engine_ready: int
    startup_probe: int
    progress_deadline: int
    execute_model: int
    pre_stop: int
    drain: int
    teardown: int
    termination_grace: int


def budgets(start_timeout: float, drain_timeout: float) -> Budgets:
    """All budgets of a deployment."""
    engine_ready = engine_ready_timeout_seconds(start_timeout)
    probe = engine_ready + PROBE_MARGIN_SECONDS
    drain = engine_shutdown_timeout_seconds(drain_timeout)
    return Budgets(
        startup=math.ceil(start_timeout),
        engine_ready=engine_ready,
        startup_probe=probe,
        progress_deadline=probe + PROBE_MARGIN_SECONDS,
        execute_model=execute_model_timeout_seconds(start_timeout),
        pre_stop=PRE_STOP_SECONDS,
        drain=drain,
        teardown=TEARDOWN_SECONDS,
        termination_grace=PRE_STOP_SECONDS + drain + TEARDOWN_SECONDS,
    )


def execute_model_timeout_seconds(start_timeout: float) -> int:
    """``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``: a quarter of a start, since both may wait for compilers."""
    least, most = EXECUTE_MODEL_SECONDS
    return min(most, max(least, math.ceil(start_timeout / 4)))


def engine_ready_timeout_seconds(start_timeout: float) -> int:
    """``VLLM_ENGINE_READY_TIMEOUT_S`` for a start that may take ``start_timeout`` seconds.

    vLLM's default of 600 s ends a start that is still loading weights (vllm-project/vllm#48031).
    """
    return math.ceil(start_timeout) + READY_TIMEOUT_MARGIN_SECONDS


def engine_shutdown_timeout_seconds(drain_timeout: float) -> int:
    """``--shutdown-timeout``: whole seconds in which vLLM finishes requests after SIGTERM; 0 aborts them."""
    return math.ceil(drain_timeout)


def exit_deadline_seconds(drain_timeout: float, *, serving: bool) -> float:
    """Seconds from SIGTERM until the engine's processes are ended by force.

    An engine that does not serve yet has nothing to drain.
    """
    return (drain_timeout if serving else 0.0) + TEARDOWN_SECONDS
