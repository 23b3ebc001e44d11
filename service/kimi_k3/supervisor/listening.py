# SPDX-License-Identifier: Apache-2.0
"""Who listens on the engine's port: an answer there counts only if the engine itself gives it.

vLLM takes its port at once but listens there only when the weights are loaded, so for all that time another
server may listen on it (both set ``SO_REUSEADDR``) and answer in the engine's place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from kimi_k3.supervisor.processes import PROC

_TABLES = ("net/tcp", "net/tcp6")
_LISTEN = "0A"
"""The state in the kernel's tables, ``TCP_LISTEN`` in hexadecimal."""


def is_foreign(port: int, pids: Iterable[int], *, proc: Path = PROC) -> bool:
    """Whether somebody listens on ``port`` and none of the processes ``pids`` does.

    Where the kernel does not tell who listens (another kernel's ``/proc``, another user's processes), nobody
    is called foreign.

    Args:
        port: of TCP, on any address of this network namespace.
        pids: the engine's processes.
    """
    listening = set(_inodes(port, proc))
    if not listening:
        return False
    for pid in pids:
        try:
            held = {_target(entry) for entry in (proc / str(pid) / "fd").iterdir()}
        except FileNotFoundError:
            continue  # gone meanwhile
        except OSError:
            return False
        if held & listening:
            return False
    return True


def _inodes(port: int, proc: Path) -> Iterator[str]:
    """What ``/proc/PID/fd`` links to for each socket that listens on ``port``."""
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in (proc / "self" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{fields[9]}]"


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""
