# SPDX-License-Identifier: Apache-2.0
"""What the operator asked the experts to be served as, and whether that may happen.

The request is vLLM's own flag, ``--quantization-config.moe.weight int4_per_group_32``. Stock vLLM
ignores it wherever its own gate (gfx942, AITER, SiTU) does not hold; here it is either done or the
start fails.
"""

from __future__ import annotations

from vllm.config import get_current_vllm_config

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.environment import ACCEPT_LOSSY, WEIGHTS, EngineEnvironment
from kimi_k3.words.weights import INT4_NAME, Weights

INT4_FLAG = f"--quantization-config.moe.weight {INT4_NAME}"


def requested_weights() -> Weights:
    """The weights that vLLM's configuration of this process asks for.

    Raises:
        OperatorError: the request is one that nobody can serve, contradicts the supervisor's, or is
            lossy without consent.
    """
    from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32

    arguments = getattr(get_current_vllm_config().model_config, "quantization_config", None)
    key = getattr(getattr(arguments, "moe", None), "weight", None)
    if key is None:
        weights = Weights.MXFP4
    elif key == kInt4Static32:
        weights = Weights.INT4
    else:
        raise OperatorError(
            f"--quantization-config.moe.weight asks for {key}, which Kimi-K3's experts cannot be served as",
            remedy=f"use {INT4_FLAG}, or leave it out to serve MXFP4 as it is",
            exit_code=ExitCode.USAGE,
        )
    environment = EngineEnvironment.read()
    if environment.weights is not None and environment.weights is not weights:
        raise OperatorError(
            f"{WEIGHTS}={environment.weights} but vLLM's configuration asks for {weights} experts",
            remedy="set both through `kimi-k3 serve --weights`",
            exit_code=ExitCode.USAGE,
        )
    if weights.lossy and not environment.accept_lossy:
        raise OperatorError(
            f"{INT4_FLAG} is a lossy conversion and {ACCEPT_LOSSY} is not 1",
            remedy=f"set {ACCEPT_LOSSY}=1 to accept it, or leave the flag out to serve MXFP4 without loss",
            exit_code=ExitCode.CONSENT,
        )
    return weights
