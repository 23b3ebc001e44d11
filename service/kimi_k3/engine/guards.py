# SPDX-License-Identifier: Apache-2.0
"""What vLLM would do to converted experts, and what it would do wrongly on gfx942: refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from kimi_k3.engine.request import INT4_FLAG
from kimi_k3.errors import OperatorError
from kimi_k3.profiles.rules import SITUV2, unfit_for_gfx942
from kimi_k3.words.weights import Weights

SWITCHES = (
    "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_MOE",
    "VLLM_ROCM_USE_AITER_MLA",
    "VLLM_ROCM_USE_AITER_FP8BMM",
)
"""Variables that the rules of profiles look at and that are on or off."""

RELOADING = (
    "converted experts cannot be loaded over: the checkpoint's MXFP4 would land in int4 memory",
    "start anew to serve other weights",
)


_COPIED = "weights that are moved between devices are copied, which torch cannot do with int4"


def check_int4(config: Any) -> None:
    """Nothing in vLLM's configuration moves or reloads experts that are int4.

    Args:
        config: ``VllmConfig``.

    Raises:
        OperatorError: names the flag.
    """
    for flag, given, why in (
        (
            "--enable-eplb",
            config.parallel_config.enable_eplb,
            "the kernels' scales are one run of numbers, which vLLM cannot move expert by expert",
        ),
        (
            "--enable-sleep-mode",
            config.model_config.enable_sleep_mode,
            "after level 2 weights are loaded again, and nobody tried level 1 with these",
        ),
        ("--cpu-offload-gb", config.offload_config.uva.cpu_offload_gb > 0, _COPIED),
        ("--offload-group-size", config.offload_config.prefetch.offload_group_size > 0, _COPIED),
        (
            "--weight-transfer-config",
            getattr(config, "weight_transfer_config", None) is not None,
            RELOADING[0],
        ),
    ):
        if given:
            raise OperatorError(f"{flag} with {INT4_FLAG}: {why}", remedy="leave it out")


def check_gfx942(config: Any, weights: Weights) -> None:
    """vLLM's configuration and environment keep the rules of profiles for gfx942, whoever started it.

    Raises:
        OperatorError: the first that is broken.
    """
    from vllm import envs
    from vllm._aiter_ops import _resolve_situv2_activation

    flags = {
        "--logprobs-mode": str(config.model_config.logprobs_mode),
        "--kv-cache-dtype": str(config.cache_config.cache_dtype),
    }
    # As vLLM reads them: "True" is as good as "1", and what is not set has a default of its version.
    variables = {name: "1" if getattr(envs, name) else "0" for name in SWITCHES}
    if weights.lossy or SITUV2 in os.environ:
        variables[SITUV2] = _resolve_situv2_activation()
    for reason in unfit_for_gfx942(flags, variables, weights):
        what, _, remedy = reason.partition("; ")
        raise OperatorError(what, remedy=remedy or "use one of the profiles (kimi-k3 plan --help)")


def refuse_reloading() -> None:
    """``reload_weights`` of a worker fails before it touches anything; there is no hook for it."""
    from vllm.v1.worker.gpu_worker import Worker

    def reload_weights(self: Any, *arguments: Any, **named: Any) -> NoReturn:
        raise OperatorError(f"reload_weights: {RELOADING[0]}", remedy=RELOADING[1])

    Worker.reload_weights = reload_weights


ANNOUNCEMENT = "Requantizing Kimi-K3 MXFP4 experts to groupwise int4"
"""What vLLM logs when its gate for int4 is open."""


@contextmanager
def announced() -> Iterator[None]:
    """vLLM announces the lossy conversion within this block, whether or not this rank's log shows it.

    ``warning_once`` shows a line on one rank, once, if the level allows it; what counts is that it is called.

    Raises:
        OperatorError: it is not: then vLLM does something else than it was asked for.
    """
    from vllm.model_executor.layers.quantization import mxfp4

    heard = []
    upstream = mxfp4.logger.warning_once

    def listen(message: str, *arguments: Any, **named: Any) -> None:
        heard.append(message)
        upstream(message, *arguments, **named)

    mxfp4.logger.warning_once = listen
    try:
        yield
    finally:
        mxfp4.logger.warning_once = upstream
    if not any(ANNOUNCEMENT in message for message in heard):
        raise OperatorError(
            f"{INT4_FLAG}: vLLM did not announce the lossy conversion ({ANNOUNCEMENT!r} in its log)",
            remedy="report this with the log; do not serve",
        )
