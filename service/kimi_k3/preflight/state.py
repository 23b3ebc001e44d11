# SPDX-License-Identifier: Apache-2.0
"""The state directory: there, ours, writable, and of no other supervisor."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.preflight.finding import Finding, failed, of_error, passed, unknown
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.places import existing, unwritable
from kimi_k3.words.environment import STATE_DIR

CHECK = "state-directory"
LOCK_FILE = "lock"
"""In each state directory; who serves from it holds a ``flock`` on this file, and its pid stands in it."""

ANOTHER = f"give a writable directory with --state-dir or {STATE_DIR}"


def check_state_dir(directory: Path) -> None:
    """Create ``directory`` and write to it once.

    Raises:
        OperatorError: it cannot be created or written, or is not a directory.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        raise OperatorError(
            f"state directory {directory}: cannot be created and written: {error.strerror or error}",
            remedy=ANOTHER,
            exit_code=ExitCode.STATE,
        ) from None


def look_at_state_dir(machine: Machine, directory: Path) -> Finding:
    """Whether a start could use ``directory``, which is absolute: nothing is created or written."""
    path = machine.path(directory)
    there = existing(path)
    if (why := unwritable(machine, there)) is not None:
        return failed(CHECK, f"state directory {directory}: {why}", ANOTHER, ExitCode.STATE)
    if there != path:
        return passed(CHECK, f"{directory} can be created")
    free = passed(CHECK, f"{directory} can be written, and no supervisor holds it")
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return free
    except OSError as error:
        what = f"state directory {directory}: cannot open {LOCK_FILE}: {error.strerror or error}"
        return failed(CHECK, what, ANOTHER, ExitCode.STATE)
    try:
        # Shared, and let go at once: whoever serves from there does not notice.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return of_error(CHECK, in_use(directory, descriptor))
    except OSError as error:
        what = f"state directory {directory}: its file system cannot lock files: {error.strerror or error}"
        return unknown(CHECK, what, "give a local directory with --state-dir")
    finally:
        os.close(descriptor)
    return free


def in_use(directory: Path, descriptor: int) -> OperatorError:
    """The error for a directory whose lock, open as ``descriptor``, another supervisor holds."""
    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    return OperatorError(
        f"state directory {directory}: in use by another supervisor"
        + (f" (pid {holder})" if holder.isdigit() else ""),
        remedy="stop that one, or give this start its own --state-dir",
        exit_code=ExitCode.IN_USE,
    )
