# SPDX-License-Identifier: Apache-2.0
"""The wheel that all images install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docker.pins import ROOT


def build(directory: Path, *, mode: int, seconds: int) -> bytes:
    """A wheel of a copy of the project whose files have this mode and time."""
    directory.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, directory)
    shutil.copytree(ROOT / "service", directory / "service", ignore=shutil.ignore_patterns("__pycache__"))
    for path in filter(Path.is_file, directory.rglob("*")):
        path.chmod(mode)
        os.utime(path, (seconds, seconds))
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "out"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    (wheel,) = (directory / "out").iterdir()
    return wheel.read_bytes()


def test_the_same_bytes_again(tmp_path: Path) -> None:
    """Whoever builds it anew can tell that nothing was added: neither times nor modes of files are in it."""
    first = build(tmp_path / "first", mode=0o644, seconds=1_700_000_000)
    assert build(tmp_path / "second", mode=0o640, seconds=1_600_000_000) == first
