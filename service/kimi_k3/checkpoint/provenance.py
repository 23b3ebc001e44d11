# SPDX-License-Identifier: Apache-2.0
"""Of which commit the files of a downloaded checkpoint are, as the hub's client notes it beside them.

It is the first line of ``.cache/huggingface/download/NAME.metadata`` (huggingface_hub, _local_folder.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kimi_k3.checkpoint.inspection import DOWNLOADS

MAX_COMMIT = 64
"""Characters; a commit has 40."""


def of_another_commit(path: Path, names: Iterable[str], revision: str) -> list[str]:
    """Those of ``names`` in ``path`` that are not noted as files of ``revision``."""
    return [name for name in names if commit_of(path, name) != revision]


def commit_of(path: Path, name: str) -> str | None:
    """The commit that a file came from; ``None`` where nobody noted one."""
    try:
        with (path / DOWNLOADS / f"{name}.metadata").open(encoding="ascii", errors="replace") as stream:
            return stream.readline(MAX_COMMIT).strip() or None
    except OSError:
        return None
