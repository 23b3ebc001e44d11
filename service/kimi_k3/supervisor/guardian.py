# SPDX-License-Identifier: Apache-2.0
"""Ends the engine, and says so in the journal, when its supervisor is killed.

The kernel sends the engine's main process SIGTERM then, but a process that is stopped, hangs or drains for
minutes does not end by it: it keeps the GPUs and the port, and readers of the journal still see ``ready``.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kimi_k3.journal.models import SUPERVISOR_FILE, Ending, PhaseChange
from kimi_k3.journal.reader import read_journal
from kimi_k3.journal.writer import now, write_record
from kimi_k3.supervisor.processes import Mark, end_processes
from kimi_k3.words.phases import ENDED, Phase

GRACE_SECONDS = 1.5
"""What the engine's processes get to end by the kernel's SIGTERM."""

REASON = "the supervisor was killed; read dmesg for oom-kill, and start again"
_DONE = b"done"


class Guardian:
    """A process that waits for the supervisor's end; made before the engine, so nothing comes between."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def guard(self, session: int) -> None:
        """The engine runs; ``session`` is the number of its session."""
        self._tell(b"%d\n" % session)

    def dismiss(self) -> None:
        """The supervisor ends the engine itself."""
        self._tell(_DONE)

    def _tell(self, text: bytes) -> None:
        # It may have been killed itself; nothing of the start depends on it.
        with contextlib.suppress(OSError):
            os.write(self._writer, text)


@contextmanager
def guardian(start_id: str, state_dir: Path) -> Iterator[Guardian]:
    """A guardian of the start until the block ends.

    It is a fork of the supervisor, which costs no memory to speak of: call this before any thread runs.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            _watch(reader, start_id, state_dir)
        finally:
            os._exit(0)
    os.close(reader)
    guard = Guardian(writer)
    try:
        yield guard
    finally:
        guard.dismiss()
        os.close(writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _watch(reader: int, start_id: str, state_dir: Path) -> None:
    # A terminal's Ctrl-C and a group's SIGTERM are for the supervisor.
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _close_all_but(reader)
    told = b""
    while chunk := os.read(reader, 64):
        told += chunk
    if told.endswith(_DONE):
        return
    session = int(told) if told.strip().isdigit() else None
    mark = Mark(start_id, state_dir, session=session, seen=now())
    with contextlib.suppress(OSError):
        _record_end(start_id, state_dir)
    end_processes(mark, grace=GRACE_SECONDS)
    # Once more: a supervisor that was killed in the middle of a write may have left an older record.
    with contextlib.suppress(OSError):
        _record_end(start_id, state_dir)


def _close_all_but(reader: int) -> None:
    """The lock of the state directory is among them, and the pipes that somebody reads to their end."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (names are numbers, not paths)
        if int(name) > 2 and int(name) != reader:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _record_end(start_id: str, state_dir: Path) -> None:
    """Write the ending, unless there is one; a start that has the directory by now writes its own anew."""
    record = read_journal(state_dir).supervisor
    if record is None or record.start_id != start_id or record.phase in ENDED:
        return
    moment = now()
    ending = Ending(at=moment, exit_code=128 + signal.SIGKILL, reason=REASON)
    phases = (*record.phases, PhaseChange(phase=Phase.FAILED, at=moment))
    changes = {"phases": phases, "ending": ending, "updated_at": moment}
    write_record(state_dir, SUPERVISOR_FILE, record.model_copy(update=changes))
