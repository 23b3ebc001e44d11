# SPDX-License-Identifier: Apache-2.0
"""Whether a directory is there, or could be made, and written by this user; found out by looking only."""

from __future__ import annotations

import os
from pathlib import Path

from kimi_k3.preflight.machine import Machine


def existing(path: Path) -> Path:
    """``path`` itself, or the nearest one above it that exists."""
    for candidate in (path, *path.parents):
        try:
            candidate.lstat()
        except OSError:
            continue
        return candidate
    return Path("/")


def unwritable(machine: Machine, there: Path) -> str | None:
    """Why nothing can be put into ``there``, which exists; ``None`` if something can."""
    if not there.is_dir():
        return f"{inside(machine, there)} is not a directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"user {machine.uid} cannot write {inside(machine, there)}"
    return None


def inside(machine: Machine, path: Path) -> Path:
    """What the machine calls the file at ``path``."""
    root = machine.root.resolve()
    for base in (root, machine.root):
        if path.is_relative_to(base):
            return Path("/") / path.relative_to(base)
    return path
