# SPDX-License-Identifier: Apache-2.0
"""Whether a launch and a checkpoint go together. vLLM would say so, too, after half a minute. Pure."""

from __future__ import annotations

from kimi_k3.checkpoint import TextConfig
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.launch import Deployment, profile_flags


def check_fit(deployment: Deployment, model: TextConfig) -> None:
    """Compare a deployment with the model's ``config.json``.

    Raises:
        OperatorError: more tokens than positions, or more stages or ranks than the model can be cut into.
    """
    path = deployment.checkpoint
    longest = profile_flags(deployment).get("--max-model-len")
    if longest is not None and int(longest) > model.max_position_embeddings:
        raise OperatorError(
            f"--max-model-len {longest}: {path} has {model.max_position_embeddings} positions",
            remedy=f"give at most {model.max_position_embeddings}",
            exit_code=ExitCode.USAGE,
        )
    stages = deployment.profile.pipeline_parallel_size
    if stages > model.num_hidden_layers:
        raise OperatorError(
            f"pipeline_parallel_size {stages}: {path} has {model.num_hidden_layers} layers",
            remedy=f"give at most {model.num_hidden_layers}",
            exit_code=ExitCode.USAGE,
        )
    ranks, heads = deployment.tensor_parallel_size, model.num_attention_heads
    if heads % ranks:
        possible = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise OperatorError(
            f"--tensor-parallel-size {ranks}: {path} has {heads} attention heads, which do not divide evenly",
            remedy=f"give one of {possible}",
            exit_code=ExitCode.USAGE,
        )
