# SPDX-License-Identifier: Apache-2.0
"""Waiting for a checkpoint that somebody else downloads, and saying how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kimi_k3.checkpoint.index import INDEX_NAME, read_index
from kimi_k3.checkpoint.inspection import require_servable
from kimi_k3.checkpoint.messages import bad_checkpoint
from kimi_k3.checkpoint.provenance import of_another_commit
from kimi_k3.errors import OperatorError

LOOK_SECONDS = 10.0
GIB = 2**30


def wait_for_checkpoint(
    path: Path,
    *,
    seconds: float,
    report: Callable[[str], None],
    revision: str | None = None,
    pause: float = LOOK_SECONDS,
) -> None:
    """Return once the checkpoint in ``path`` can be served.

    Only when every shard has come are their headers read, which takes seconds on a network file system.

    Args:
        seconds: how long to wait.
        report: gets a line whenever more has come.
        revision: the commit that all files must be of; else another one's, that is being replaced, would do.
        pause: seconds between two looks.

    Raises:
        OperatorError: it is not there in time; says what is missing.
    """
    end = time.monotonic() + seconds
    last = ""
    while True:
        problem: OperatorError | None = None
        come = progress(path, revision)
        if come is None:
            try:
                require_servable(path)
                return
            except OperatorError as error:
                problem = error
                come = error.what
        if come != last:
            report(come)
            last = come
        if time.monotonic() >= end:
            raise problem or bad_checkpoint(
                f"checkpoint {path} is not complete after {seconds:g} s: {come}",
                "look at whoever downloads it, and give it more time",
            )
        time.sleep(min(pause, max(0.0, end - time.monotonic())))


def progress(path: Path, revision: str | None = None) -> str | None:
    """What has come, or ``None`` when every shard that the index names is there, and of ``revision``."""
    index = path / INDEX_NAME
    try:
        names = sorted(read_index(index).shards) if index.exists() else []
    except OperatorError as error:
        return error.what
    if not names:
        return f"checkpoint {path}: no index yet"
    sizes = [_size(path / name) for name in names]
    there = [size for size in sizes if size is not None]
    if len(there) == len(names):
        other = [] if revision is None else of_another_commit(path, (INDEX_NAME, *names), revision)
        if not other:
            return None
        return f"checkpoint {path}: {len(other)} of {len(names) + 1} files are not of {revision} yet"
    return f"checkpoint {path}: {len(there)} of {len(names)} shards, {sum(there) / GIB:.1f} GiB"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
