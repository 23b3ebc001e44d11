# SPDX-License-Identifier: Apache-2.0
"""vLLM as a child: its own session, its output line by line."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

from kimi_k3.supervisor.redact import Lines, Secrets

READ_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


class Child:
    """The engine's main process.

    It leads a session of its own, so a Ctrl-C in the terminal reaches only the supervisor, which
    then drains. The kernel sends it SIGTERM when the supervisor is killed. Create it in the main
    thread: the kernel takes the end of the creating thread for the parent's death.

    Args:
        sink: gets every line of standard output and standard error, without ``secrets``, from a
            thread of its own.

    Raises:
        OSError: the command cannot be executed.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        secrets: Secrets,
        sink: Callable[[str], None],
    ) -> None:
        self._lines = Lines(secrets)
        self._sink = sink
        self._process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
        self._reader = threading.Thread(target=self._read, name="engine-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Pid, and number of the session and of the process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code as :mod:`subprocess` gives it, ``None`` while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """SIGTERM to the main process only; it ends its own children in order."""
        self._process.send_signal(signal.SIGTERM)

    def close(self, *, seconds: float) -> None:
        """Reap the process and read what is left in the pipe, for at most ``seconds`` each.

        Call it when the session has ended; a process that escaped may hold the pipe open for ever.
        """
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        self.read_to_end(seconds=seconds)

    def read_to_end(self, *, seconds: float) -> None:
        """Wait until everything printed has been read, for at most ``seconds``."""
        self._reader.join(seconds)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while chunk := pipe.read(READ_BYTES):
                for line in self._lines.feed(chunk):
                    self._sink(line)
        for line in self._lines.finish():
            self._sink(line)


def die_with_parent(parent: int) -> Callable[[], None]:
    """For ``preexec_fn``: the kernel sends the child SIGTERM when its parent ends, however it does.

    Args:
        parent: who starts it, in its main thread.
    """
    # Loaded before the fork: afterwards only async-signal-safe work is allowed.
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            # The supervisor died between fork and prctl; the signal will not come.
            os._exit(128 + signal.SIGTERM)

    return prepare
