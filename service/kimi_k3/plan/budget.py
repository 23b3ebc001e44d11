# SPDX-License-Identifier: Apache-2.0
"""Time budgets: everything follows from the start timeout and the drain timeout."""

from __future__ import annotations

import math

READY_TIMEOUT_MARGIN_SECONDS = 60
"""vLLM's own ready timeout lies this much above ours, so that the message that names the phase wins."""

TEARDOWN_SECONDS = 20
"""From the end of draining to the engine's exit: vLLM allows its processes 15 s on ROCm
(``ROCM_ENGINE_PROCESS_SHUTDOWN_TIMEOUT_S``, vllm/v1/engine/utils.py); killing earlier can leave
device memory taken."""


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
