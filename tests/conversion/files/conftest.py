# SPDX-License-Identifier: Apache-2.0
"""What the tests of reports share."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3.checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, to be read only."""
    directory = tmp_path_factory.mktemp("report") / "tiny"
    make_tiny_checkpoint(directory)
    return directory


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No report of another test, or of the developer, goes on here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
