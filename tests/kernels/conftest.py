# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's config and one double of AITER per generation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .doubles import Double, Generation, install, k3_rows

CONFIG = Path(__file__).parent.parent / "checkpoint/data/k3-config.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with the published config and nothing else."""
    directory = tmp_path / "K3"
    directory.mkdir()
    shutil.copyfile(CONFIG, directory / "config.json")
    return directory


@pytest.fixture(params=list(Generation))
def double(request: pytest.FixtureRequest, tmp_path: Path) -> Double:
    """Each generation; the later two ship a tuned table, which is ragged."""
    found = install(tmp_path / "site", request.param)
    if found.generation is not Generation.FIRST:
        found.ship(k3_rows())
    return found
