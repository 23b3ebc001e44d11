# SPDX-License-Identifier: Apache-2.0
"""What the doctor reads: a log, and a start's state directory, which may be another user's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kimi_k3.diagnosis.scan import Evidence, Scanner
from kimi_k3.diagnosis.unpack import Damaged, NotText, as_text
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import NotRegularFile, open_regular
from kimi_k3.journal.models import SUPERVISOR_FILE
from kimi_k3.journal.reader import Journal, read_journal
from kimi_k3.supervisor.logfile import EARLIER_LOG_FILE, LOG_FILE

READ_BYTES = 256 * 1024
STDIN = "-"


@dataclass(frozen=True)
class Log:
    """What is in a log; ``name`` is its path, ``hints`` say what of it is missing."""

    name: str
    evidence: Evidence
    hints: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """What a start left behind; ``log`` is the path of its engine's output, if there is one."""

    directory: Path
    journal: Journal
    log: Path | None
    hints: tuple[str, ...]


def read_state(directory: Path) -> State:
    """Read a state directory; the log of an earlier start is not taken for that of one that had none.

    Raises:
        OperatorError: it is none, cannot be read, or nothing was started with it.
    """
    try:
        names = {path.name for path in directory.iterdir()}
    except NotADirectoryError:
        raise _unusable(f"--state {directory}: it is not a directory", _STATE_REMEDY) from None
    except OSError as error:
        raise _refused("--state", directory, error, _STATE_REMEDY) from None
    journal = read_journal(directory)
    faults = tuple(f"{fault.file}: {fault.why}" for fault in journal.faults)
    supervisor = journal.supervisor
    if supervisor is None and LOG_FILE not in names:
        what = next(
            (fault for fault in faults if fault.startswith(SUPERVISOR_FILE)), "nothing was started with it"
        )
        raise _unusable(f"--state {directory}: {what}", f"{_STATE_REMEDY}, or a --log")
    log = directory / LOG_FILE if LOG_FILE in names else None
    if log is not None and supervisor is not None and supervisor.ending and supervisor.engine_pid is None:
        return State(directory, journal, None, (*faults, f"of an earlier start: {log}"))
    if EARLIER_LOG_FILE in names:
        faults = (*faults, f"an earlier part, or an earlier start: {directory / EARLIER_LOG_FILE}")
    return State(directory, journal, log, faults)


def read_log(log: Path | str, option: str = "--log") -> Log:
    """Look through a log, compressed or not.

    Args:
        log: a path, or ``-`` for standard input.
        option: what named it.

    Raises:
        OperatorError: it cannot be read, or is no text.
    """
    if log == STDIN:
        return _scanned(sys.stdin.buffer, "standard input", "standard input")
    path = Path(log)
    try:
        stream = open_regular(path)
    except NotRegularFile as error:
        remedy = "give a file, or - and the log on standard input"
        raise _unusable(f"{option} {path}: {error.strerror}", remedy) from None
    except OSError as error:
        raise _refused(option, path, error, "give the file with vLLM's output") from None
    with stream:
        return _scanned(stream, f"{option} {path}", str(path))


_STATE_REMEDY = "give the --state-dir of the start"


def _scanned(stream: BinaryIO, option: str, name: str) -> Log:
    scanner = Scanner()
    hints: tuple[str, ...] = ()
    try:
        for chunk in as_text(_chunks(stream, option)):
            scanner.feed(chunk)
    except NotText as error:
        raise _unusable(f"{option}: {error}", error.remedy) from None
    except Damaged as error:
        if not scanner.evidence().lines:
            raise _unusable(f"{option}: {error}", "copy it again") from None
        hints = (f"only a part of {name} could be read: {error}",)
    return Log(name, scanner.evidence(), hints)


def _chunks(stream: BinaryIO, option: str) -> Iterator[bytes]:
    try:
        while chunk := os.read(stream.fileno(), READ_BYTES):
            yield chunk
    except OSError as error:
        what = f"{option}: cannot be read: {error.strerror or error}"
        raise _unusable(what, "give vLLM's output as a file") from None


def _refused(option: str, path: Path, error: OSError, remedy: str) -> OperatorError:
    if isinstance(error, PermissionError):
        remedy = "ask as the user who started it, or as root"
    return _unusable(f"{option} {path}: {error.strerror or error}", remedy)


def _unusable(what: str, remedy: str) -> OperatorError:
    return OperatorError(what, remedy=remedy, exit_code=ExitCode.STATE)
