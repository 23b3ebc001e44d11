# SPDX-License-Identifier: Apache-2.0
"""The processes of one start, found by what they carry in their environment.

A process group does not hold everything: a worker may open a session of its own, and a group's
number says nothing once its leader is gone. The start id in ``/proc/PID/environ`` is inherited by
every descendant and cannot belong to anything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from kimi_k3.journal import environment as names

POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""A killed process that is still there after this long waits in the kernel; nothing ends it."""


def processes_of(
    start_id: str, state_dir: Path, *, session: int | None = None, proc: Path = Path("/proc")
) -> tuple[int, ...]:
    """Pids of the living processes of start ``start_id`` in ``state_dir``; never the caller's own.

    Zombies are not found: they hold nothing any more.

    Args:
        session: also every process of this session, which may have replaced its environment. Only
            for a session that this process began itself: the number may be someone else's later.
    """
    wanted = {f"{names.START_ID}={start_id}".encode(), f"{names.STATE_DIR}={state_dir}".encode()}
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = set((entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            variables = set()  # gone meanwhile, or another user's
        if wanted <= variables or (session is not None and _session_of(entry) == session):
            found.append(int(entry.name))
    return tuple(sorted(found))


def is_running(pid: int, *, proc: Path = Path("/proc")) -> bool:
    """Whether ``pid`` is a process that still runs (a zombie does not)."""
    fields = _stat(proc / str(pid))
    return bool(fields) and fields[0] not in ("Z", "X")


def _session_of(entry: Path) -> int | None:
    """The session of a process that runs."""
    fields = _stat(entry)
    return int(fields[3]) if fields and fields[0] not in ("Z", "X") else None


def _stat(entry: Path) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the state on (proc(5)), or none when the process is gone."""
    try:
        stat = (entry / "stat").read_text()
    except OSError:
        return []
    # The name in parentheses may hold spaces and parentheses itself.
    return stat.rpartition(")")[2].split()


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; a process that is gone already is what was wanted."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def end_processes(
    start_id: str, state_dir: Path, *, grace: float, session: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """SIGTERM every process of the start, after ``grace`` seconds SIGKILL, until none is left.

    Returns:
        The pids that were found, and those that are still there (uninterruptible in the kernel, or
        another user's).
    """

    def living() -> tuple[int, ...]:
        return processes_of(start_id, state_dir, session=session)

    found = set(living())
    for pid in found:
        send(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while living() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + KILL_SECONDS
    # Again and again: a process may have forked between the look and the kill.
    while (left := living()) and time.monotonic() < deadline:
        found.update(left)
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return tuple(sorted(found)), left
