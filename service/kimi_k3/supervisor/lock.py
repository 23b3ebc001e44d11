# SPDX-License-Identifier: Apache-2.0
"""One supervisor per state directory and per address.

The kernel drops a ``flock`` with its last open descriptor, so ``kill -9`` of a supervisor frees it.
The file itself stays: unlinking a lock file lets two starts each hold a lock on a file of that name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.preflight.state import LOCK_FILE, in_use


@contextmanager
def hold_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of the state directory ``directory``.

    Raises:
        OperatorError: another supervisor holds it (names its pid), or the file cannot be opened.
    """
    path = directory / LOCK_FILE
    try:
        # Python opens descriptors close-on-exec, so the engine does not inherit the lock.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except OSError as error:
        raise OperatorError(
            f"state directory {directory}: cannot open {LOCK_FILE}: {error.strerror or error}",
            remedy="give a writable directory with --state-dir",
            exit_code=ExitCode.STATE,
        ) from None
    try:
        _acquire(descriptor, directory)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def hold_address(host: str, port: int) -> Iterator[None]:
    """Hold the name of an address that an engine will listen on.

    vLLM listens only when the weights are loaded; until then the port is free for anybody who asks the
    kernel, and two starts would load for half an hour before one of them fails. An abstract socket's name
    belongs to the network namespace, as the port does, and the kernel frees it with the process (unix(7)).

    Raises:
        OperatorError: another supervisor holds it.
    """
    with socket.socket(socket.AF_UNIX) as holder:
        try:
            holder.bind(f"\0kimi-k3-gfx942/{host}:{port}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OperatorError(
                f"--port {port} on {host}: another supervisor's engine is about to listen there",
                remedy="stop that one or give this start another --port",
                exit_code=ExitCode.IN_USE,
            ) from None
        yield


def _acquire(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise in_use(directory, descriptor) from None
    except OSError as error:
        raise OperatorError(
            f"state directory {directory}: its file system cannot lock files: {error.strerror or error}",
            remedy="give a local directory with --state-dir",
            exit_code=ExitCode.STATE,
        ) from None
