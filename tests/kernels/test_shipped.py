# SPDX-License-Identifier: Apache-2.0
"""Kernels that an image brings get to where they are used, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kimi_k3.kernels.shapes import ARCHITECTURE
from kimi_k3.kernels.shipped import bring
from kimi_k3.kernels.wanted import built_directory

from .doubles import Generation, install


def test_shipped_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied once; those of another AITER stay where they are, and a copy that fails leaves nothing."""
    double = install(tmp_path / "site", Generation.THIRD)
    search = (str(double.site),)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    shipped = tmp_path / "image"
    assert bring(environment, shipped=shipped, search=search) is None
    (shipped / "of-another-aiter").mkdir(parents=True)
    (shipped / "of-another-aiter" / "a.pkl").write_text("")
    assert bring(environment, shipped=shipped, search=search) is None
    name = double.aiter.directory_name(ARCHITECTURE)
    (shipped / name / "kernels").mkdir(parents=True)
    (shipped / name / "kernels" / "a.pkl").write_text("compiled")

    def full(source: Path, target: Path) -> None:
        target.mkdir(parents=True)
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", full)
        with pytest.raises(OSError, match="no space"):
            bring(environment, shipped=shipped, search=search)
    assert list((tmp_path / "cache" / "kimi-k3" / "kernels").iterdir()) == []
    # As whoever looked for kernels there may have left it.
    (tmp_path / "cache" / "kimi-k3" / "kernels" / name).mkdir()
    place = bring(environment, shipped=shipped, search=search)
    assert place is not None
    assert (place / "kernels" / "a.pkl").read_text() == "compiled"
    assert built_directory(environment, search) == place
    assert bring(environment, shipped=shipped, search=search) is None
