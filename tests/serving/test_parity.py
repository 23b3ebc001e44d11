# SPDX-License-Identifier: Apache-2.0
"""What vLLM serves is what the checkpoint says: token for token, and figure for figure."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.reference.forward import ReferenceModel
from tests.reference.int4 import Loss
from tests.serving.deployment import Deployment, Mode

MODES = [
    Mode(),
    Mode(weights="int4"),
    Mode(weights="int4", scale_rule="amax"),
    Mode(ranks=2),
    Mode(weights="int4", ranks=2),
    Mode(ranks=2, expert_parallel=True),
    Mode(weights="int4", ranks=2, expert_parallel=True),
]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize("deployment", MODES, indirect=True, ids=str, scope="module"),
]


@cache
def reference(checkpoint: Path, weights: Any) -> ReferenceModel:
    return ReferenceModel.load(checkpoint, weights=weights)


@pytest.mark.parametrize("length", [20, 90, 300])
def test_greedy_tokens_equal_the_reference(deployment: Deployment, tiny: Path, length: int) -> None:
    """Model class, loader, conversion, caches and stand-ins together compute the model that is on disk."""
    prompt = random.Random(length).choices(range(256), k=length)
    served = deployment.complete(prompt, 48)
    expected = reference(tiny, deployment.mode.reference_weights).greedy(prompt, 48, draft=served)
    assert served == expected
    assert len(set(served)) > 10, "a degenerate answer would equal anything"


def test_conversion_endpoint_equals_a_recomputation(deployment: Deployment, tiny: Path) -> None:
    """An operator accepts a loss on the strength of these figures; they must be those of this checkpoint."""
    body = deployment.sidecar("/conversion").json()
    losses = _by_projection(reference(tiny, deployment.mode.reference_weights).losses)
    assert body["lossless"] is (deployment.mode.weights == "mxfp4")
    assert {(layer["layer"], layer["projection"]) for layer in body["layers"]} == set(losses)
    for layer in body["layers"]:
        expected = losses[layer["layer"], layer["projection"]]
        squared_error = math.fsum(loss.squared_error for loss in expected)
        energy = math.fsum(loss.energy for loss in expected)
        assert layer["groups"] == sum(loss.groups for loss in expected)
        assert layer["lossless_groups"] == sum(loss.lossless for loss in expected)
        assert layer["relative_mse"] == pytest.approx(squared_error / energy, rel=1e-9)
        assert layer["max_error"] == max(loss.max_abs_error for loss in expected)
        assert len(layer["ranks"]) == deployment.mode.ranks
    if losses:
        assert body["progress"]["done"] == body["progress"]["expected"] == len(losses) * deployment.mode.ranks


def _by_projection(losses: dict[str, Loss]) -> dict[tuple[int, str], list[Loss]]:
    """Losses of ``...layers.L.block_sparse_moe.experts.E.w1`` by layer and vLLM's fused projection."""
    grouped = defaultdict(list)
    for name, loss in losses.items():
        layer = int(name.split(".layers.")[1].split(".")[0])
        grouped[layer, "w2" if name.endswith(".w2") else "w13"].append(loss)
    return dict(grouped)


def test_warnings_are_empty_exactly_when_nothing_is_lost(deployment: Deployment) -> None:
    """A warning that is always there is read by nobody; a lossy deployment without one is a lie."""
    codes = [warning["code"] for warning in deployment.sidecar("/warnings").json()["warnings"]]
    assert codes == ([] if deployment.mode.weights == "mxfp4" else ["lossy-weights"])


def test_every_rank_tells_its_way_and_its_memory(deployment: Deployment) -> None:
    """A start that takes an hour must be visible rank by rank; so must the memory it took."""
    status = deployment.sidecar("/status").json()
    assert [rank["rank"] for rank in status["ranks"]] == list(range(deployment.mode.ranks))
    for rank in status["ranks"]:
        phases = [entry["phase"] for entry in rank["history"]]
        assert phases == ["loading", "converting", "compiling", "warming", "ready"]
    memory = deployment.sidecar("/memory").json()
    assert len(memory["ranks"]) == deployment.mode.ranks


def test_the_key_is_nowhere_to_be_read(deployment: Deployment) -> None:
    """A key in argv is readable by every user of the machine, a key in a log by everyone who gets the log."""
    assert deployment.api_key is not None
    key = deployment.api_key.encode()
    for file in (deployment.log, *deployment.state_dir.iterdir()):
        assert key not in file.read_bytes(), file
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert key not in command_line.read_bytes()
        except OSError:
            continue
