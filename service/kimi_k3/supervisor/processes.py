# SPDX-License-Identifier: Apache-2.0
"""The processes of one start, found by what marks them.

Two marks, because neither is enough. The start id in ``/proc/PID/environ`` is inherited by every
descendant, also by one with a session of its own; but vLLM names its processes with setproctitle,
which writes over that memory. The session that the engine's main process leads holds those; but its
number may be somebody else's once all of its processes are gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kimi_k3.words import environment as names

PROC = Path("/proc")
POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""A killed process that is still there after this long waits in the kernel; nothing ends it."""

TRACKER_SECONDS = 1.0
"""What the resource tracker gets for its clean-up once its clients are gone."""

CLOCK_SECONDS = 3.0
"""How much two moments may differ that are the same: ``btime`` has whole seconds, a heartbeat is old
by up to two."""


@dataclass(frozen=True)
class Mark:
    """What marks the processes of a start.

    Attributes:
        session: number of the session that the engine's main process leads, if it is known.
        seen: when that process was last known to run; ``None``: it is this process's own child. In
            a session of the same number that began later are strangers.
    """

    start_id: str
    state_dir: Path
    session: int | None = None
    seen: datetime | None = None


def processes_of(mark: Mark, *, proc: Path = PROC) -> tuple[int, ...]:
    """Pids of the living processes of a start; never the caller's own.

    Zombies are not found: they hold nothing any more.
    """
    return tuple(
        sorted(
            int(entry.name)
            for entry in proc.iterdir()
            if entry.name.isdigit() and int(entry.name) != os.getpid() and belongs(entry, mark, proc=proc)
        )
    )


def belongs(entry: Path, mark: Mark, *, proc: Path = PROC) -> bool:
    """Whether ``/proc/PID`` is a living process of a start."""
    variables = {
        f"{names.START_ID}={mark.start_id}".encode(),
        f"{names.STATE_DIR}={mark.state_dir}".encode(),
    }
    return variables <= _environment(entry) or _in_session(entry, mark, proc)


def is_running(pid: int, *, proc: Path = PROC) -> bool:
    """Whether ``pid`` is a process that still runs (a zombie does not)."""
    return _runs(stat_of(proc / str(pid)))


def runs_since(pid: int, moment: datetime, *, proc: Path = PROC) -> bool:
    """Whether ``pid`` is a running process that is not this one and ran at ``moment`` already.

    Else it is another one that got its number: in a container each supervisor is process 1.
    """
    stat = stat_of(proc / str(pid))
    return pid != os.getpid() and _runs(stat) and _ran_at(stat, moment, proc)


def end_processes(mark: Mark, *, grace: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """SIGTERM every process of the start, after ``grace`` seconds SIGKILL, until none is left.

    Returns:
        The pids that were found, and those that are still there (uninterruptible in the kernel, or
        another user's).
    """
    found = set(processes_of(mark))
    for pid in found:
        _send(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    _kill_all(mark, found, spare=_is_resource_tracker, seconds=KILL_SECONDS)
    # With its last client gone, Python's resource tracker removes their shared memory and ends.
    deadline = time.monotonic() + TRACKER_SECONDS
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    left = _kill_all(mark, found, spare=lambda _: False, seconds=KILL_SECONDS)
    return tuple(sorted(found)), left


def _kill_all(
    mark: Mark, found: set[int], *, spare: Callable[[int], bool], seconds: float
) -> tuple[int, ...]:
    """SIGKILL until only spared processes are left, or ``seconds`` are over; returns who is left."""
    deadline = time.monotonic() + seconds
    # Again and again: a process may have forked between the look and the kill.
    while left := tuple(pid for pid in processes_of(mark) if not spare(pid)):
        if time.monotonic() >= deadline:
            break
        found.update(left)
        for pid in left:
            _send(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return left


def _is_resource_tracker(pid: int) -> bool:
    """Whether this is the process with which Python's multiprocessing cleans up after its clients."""
    try:
        return b"multiprocessing.resource_tracker" in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def _send(pid: int, number: signal.Signals) -> None:
    # A process that is gone already is what was wanted; another user's is reported as left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _environment(entry: Path) -> set[bytes]:
    try:
        return set((entry / "environ").read_bytes().split(b"\0"))
    except OSError:
        return set()  # gone meanwhile, or another user's


def _in_session(entry: Path, mark: Mark, proc: Path) -> bool:
    """Whether the process is in the start's session, and not in a later one of the same number."""
    if mark.session is None:
        return False
    stat = stat_of(entry)
    if not _runs(stat) or int(stat[3]) != mark.session:
        return False
    return mark.seen is None or _ran_at(stat, mark.seen, proc)


def _ran_at(stat: list[str], moment: datetime, proc: Path) -> bool:
    return _began(stat, proc) <= moment.timestamp() + CLOCK_SECONDS


def _runs(stat: list[str]) -> bool:
    return bool(stat) and stat[0] not in ("Z", "X")


def _began(stat: list[str], proc: Path) -> float:
    """When a process began, in seconds of the epoch."""
    boot = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
    return int(boot.split()[1]) + int(stat[19]) / os.sysconf("SC_CLK_TCK")


def stat_of(entry: Path) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the state on (proc(5)), or none when the process is gone.

    Args:
        entry: ``/proc/PID``.
    """
    try:
        stat = (entry / "stat").read_text()
    except OSError:
        return []
    # The name in parentheses may hold spaces and parentheses itself.
    return stat.rpartition(")")[2].split()
