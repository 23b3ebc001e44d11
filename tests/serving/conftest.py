# SPDX-License-Identifier: Apache-2.0
"""One tiny checkpoint, and one deployment per mode for all tests of that mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_k3.checkpoint import make_tiny_checkpoint
from tests.serving.deployment import Deployment, Mode, started

API_KEY = "a-key-that-must-not-leak"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A ready deployment of the mode that the test module asks for; guarded by an API key."""
    mode: Mode = request.param
    with started(tiny, tmp_path_factory.mktemp(str(mode)), mode, api_key=API_KEY) as ready:
        yield ready
