# SPDX-License-Identifier: Apache-2.0
"""What an earlier start left behind when its supervisor was killed. Call only while holding the lock."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import (
    FAILURE_FILE_PATTERN,
    NODE_FILE_PATTERN,
    RANK_FILE_PATTERN,
    SUPERVISOR_FILE,
    EarlierStart,
)
from kimi_k3.journal.reader import read_journal
from kimi_k3.plan.launch import socket_dir
from kimi_k3.supervisor.processes import PROC, Mark, end_processes, runs_since

GRACE_SECONDS = 5.0
"""What processes nobody waits for any more get between SIGTERM and SIGKILL."""

STALE_PATTERNS = (
    RANK_FILE_PATTERN,
    FAILURE_FILE_PATTERN,
    NODE_FILE_PATTERN,
    # The journal writer's temporary files, left when a process was killed between write and rename.
    f".{RANK_FILE_PATTERN}.*",
    f".{FAILURE_FILE_PATTERN}.*",
    f".{NODE_FILE_PATTERN}.*",
    f".{SUPERVISOR_FILE}.*",
)


def clear_leftovers(state_dir: Path, *, report: Callable[[str], None]) -> EarlierStart | None:
    """End the earlier start's processes and remove the engine's records of it.

    Returns:
        How it went; ``None`` if there was none, or nobody can read its record.

    Raises:
        OperatorError: a process does not end, or a file cannot be removed.
    """
    earlier = read_journal(state_dir).supervisor
    if earlier is not None:
        if (
            earlier.ending is None
            and runs_since(earlier.pid, earlier.updated_at)
            and _supervises(earlier.pid)
        ):
            # Its lock file was removed from under it, with the directory or by hand.
            raise OperatorError(
                f"state directory {state_dir}: in use by another supervisor (pid {earlier.pid})",
                remedy="stop that one, or give this start its own --state-dir",
                exit_code=ExitCode.IN_USE,
            )
        sockets = socket_dir(earlier.start_id, Path(tempfile.gettempdir()))
        mark = Mark(earlier.start_id, state_dir, session=earlier.engine_pid, seen=earlier.updated_at)
        ended, left = end_processes(mark, grace=GRACE_SECONDS)
        if ended:
            report(
                f"ended {len(ended)} process(es) that start {earlier.start_id} left behind: "
                f"pid {', '.join(map(str, ended))}"
            )
        if left:
            raise OperatorError(
                f"pid {', '.join(map(str, left))} of the earlier start {earlier.start_id} cannot be ended",
                remedy="end them as their user, or restart the machine if they hang in a driver",
                exit_code=ExitCode.IN_USE,
            )
        shutil.rmtree(sockets, ignore_errors=True)
    try:
        for pattern in STALE_PATTERNS:
            for path in state_dir.glob(pattern):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise OperatorError(
            f"state directory {state_dir}: cannot remove old records: {error.strerror or error}",
            remedy="make it writable or give another --state-dir",
            exit_code=ExitCode.STATE,
        ) from None
    return None if earlier is None else earlier.as_earlier()


def _supervises(pid: int) -> bool:
    """Whether ``pid`` looks like a `kimi-k3 serve`, and not like a process that got its number later."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"serve" in words
