# SPDX-License-Identifier: Apache-2.0
"""Kernels that an image brings: compiled while it was built, where nobody can write once it runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kimi_k3.errors import OperatorError
from kimi_k3.kernels.installed import find_aiter
from kimi_k3.kernels.shapes import ARCHITECTURE
from kimi_k3.kernels.wanted import default_cache

SHIPPED = Path(sys.prefix) / "kernels"
"""Where docker/rocm.Dockerfile has them compiled (``kernels build --cache-dir``)."""


def bring(
    environment: Mapping[str, str], *, shipped: Path = SHIPPED, search: Sequence[str] | None = None
) -> Path | None:
    """Copy what is shipped for the installed AITER to the usual place, to which FlyDSL can add others.

    Returns:
        The copy; ``None`` if nothing is shipped, or something is in that place already.

    Raises:
        OSError: it cannot be copied; nothing half copied is left.
    """
    try:
        name = find_aiter(search).directory_name(ARCHITECTURE)
        place = default_cache(environment) / name
    except OperatorError:
        return None
    taken = place.is_dir() and any(place.iterdir())
    if taken or not any((shipped / name).rglob("*.pkl")):
        return None
    unfinished = place.with_name(f"{name}.new-{os.getpid()}")
    try:
        shutil.copytree(shipped / name, unfinished)
        unfinished.rename(place)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return place
