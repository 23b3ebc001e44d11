# SPDX-License-Identifier: Apache-2.0
"""A deployment against the model's own limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_k3.checkpoint import TextConfig, make_tiny_checkpoint, read_config
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.fit import check_fit
from kimi_k3.plan.overrides import changed

from .test_launch import DEPLOYMENT, with_flags


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextConfig:
    directory = tmp_path_factory.mktemp("fit") / "tiny"
    make_tiny_checkpoint(Path(directory))
    return read_config(directory / "config.json").text_config


def test_what_fits(model: TextConfig) -> None:
    """The profile's own values, and the limits themselves."""
    check_fit(DEPLOYMENT, model)
    limit = model.max_position_embeddings
    check_fit(replace(with_flags(DEPLOYMENT, max_model_len=limit), tensor_parallel_size=2), model)


def test_more_tokens_than_positions(model: TextConfig) -> None:
    """The largest possible value stands in the message."""
    limit = model.max_position_embeddings
    with pytest.raises(OperatorError, match=f"at most {limit}") as caught:
        check_fit(with_flags(DEPLOYMENT, max_model_len=limit + 1), model)
    assert caught.value.exit_code is ExitCode.USAGE


def test_more_stages_than_layers(model: TextConfig) -> None:
    """A stage without a layer has nothing to do, and vLLM says so only while loading."""
    layers = model.num_hidden_layers
    profile = changed(DEPLOYMENT.profile, {"pipeline_parallel_size": layers + 1}, given="a test")
    with pytest.raises(OperatorError, match=f"give at most {layers}"):
        check_fit(replace(DEPLOYMENT, profile=profile), model)


def test_ranks_that_do_not_divide_the_heads(model: TextConfig) -> None:
    """The possible numbers stand in the message."""
    with pytest.raises(OperatorError, match="one of 1, 2"):
        check_fit(replace(DEPLOYMENT, tensor_parallel_size=3), model)
