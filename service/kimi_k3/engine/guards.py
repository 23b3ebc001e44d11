# SPDX-License-Identifier: Apache-2.0
"""What vLLM would do to converted experts, and what it would do wrongly on gfx942: refused by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from kimi_k3.engine.request import INT4_FLAG
from kimi_k3.errors import OperatorError
from kimi_k3.profiles.rules import unfit_for_gfx942
from kimi_k3.words.weights import Weights

RELOADING = (
    "converted experts cannot be loaded over: the checkpoint's MXFP4 would land in int4 memory",
    "start anew to serve other weights",
)


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
    flags = {
        "--logprobs-mode": str(config.model_config.logprobs_mode),
        "--kv-cache-dtype": str(config.cache_config.cache_dtype),
    }
    for reason in unfit_for_gfx942(flags, os.environ, weights):
        what, _, remedy = reason.partition("; ")
        raise OperatorError(what, remedy=remedy or "use one of the profiles (kimi-k3 plan --help)")


def refuse_reloading() -> None:
    """``reload_weights`` of a worker fails before it touches anything; there is no hook for it."""
    from vllm.v1.worker.gpu_worker import Worker

    def reload_weights(self: Any, *arguments: Any, **named: Any) -> NoReturn:
        raise OperatorError(f"reload_weights: {RELOADING[0]}", remedy=RELOADING[1])

    Worker.reload_weights = reload_weights


ANNOUNCEMENT = "Requantizing Kimi-K3 MXFP4 experts to groupwise int4"
"""What vLLM logs, once in a process, when its gate for int4 is open."""

_announced = False


@contextmanager
def announced() -> Iterator[None]:
    """vLLM announces the lossy conversion within this block, or has done so before in this process.

    Raises:
        OperatorError: it does not: then it does something else than it says.
    """
    global _announced
    logger = logging.getLogger("vllm.model_executor.layers.quantization.mxfp4")
    heard = _Ear()
    logger.addHandler(heard)
    try:
        yield
    finally:
        logger.removeHandler(heard)
    _announced = _announced or heard.heard
    if not _announced:
        raise OperatorError(
            f"{INT4_FLAG}: vLLM did not announce the lossy conversion ({ANNOUNCEMENT!r} in its log)",
            remedy="report this with the log; do not serve",
        )


class _Ear(logging.Handler):
    """Hears the announcement, whatever else is done with the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard = False

    def emit(self, record: logging.LogRecord) -> None:
        """Listen."""
        self.heard = self.heard or ANNOUNCEMENT in record.getMessage()
