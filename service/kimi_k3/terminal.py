# SPDX-License-Identifier: Apache-2.0
"""What stands around a command: its streams, however they are closed or full, and signals that end it."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import Any


class ReaderGone(Exception):
    """Whoever read standard output has seen enough."""


class Terminated(BaseException):
    """A signal asked this command to end; what it had begun is cleaned up on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class NotWritten(OSError):
    """Standard output cannot be written, e.g. because a disk is full."""


class _Output(io.FileIO):
    """Standard output, whose failures are told apart from those of other files."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            # The parser would take the error for its own and exit with 1.
            raise ReaderGone from None
        except OSError as error:
            raise NotWritten(error.errno, error.strerror) from None


class _Errors(io.FileIO):
    """Standard error: what cannot be written there cannot be told anywhere, so it is dropped."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


def mend_streams() -> None:
    """Make standard output and error take any text, and stay there when they are closed or full.

    Names of files and what they hold come from anywhere: a character that the terminal's encoding does
    not know is written as an escape.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # The lowest free number is the closed one's own, so that no other file gets it.
            descriptor = os.open(os.devnull, os.O_RDWR)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for name, kind in (("stdout", _Output), ("stderr", _Errors)):
        stream = getattr(sys, name)
        mended = io.TextIOWrapper(
            io.BufferedWriter(kind(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, mended)


def give_up_what_is_unwritten() -> None:
    """Python writes what is left when it exits; that must neither complain again nor change the exit code."""
    try:
        sys.stdout.flush()
    except (OSError, ReaderGone):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(number: int, _: Any) -> None:
    raise Terminated(number)


def _is_imported_by(package: str, frame: FrameType | None) -> bool:
    """Whether what runs in ``frame`` does so because a module of ``package`` imports something."""
    caller = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        inside = f"{name}.".startswith(f"{package}.")
        if inside and caller.partition(".")[0] in ("importlib", "_frozen_importlib"):
            return True
        caller, frame = name, frame.f_back
    return False


def end_cleanly(commands: str) -> None:
    """Let SIGTERM and SIGHUP raise :class:`Terminated`, and SIGINT ``KeyboardInterrupt``; in the main thread.

    Args:
        commands: the package whose commands import what they need before they begin anything. A SIGINT
            meanwhile ends the process at once: libraries swallow exceptions there, or wrap them.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _is_imported_by(commands, frame):
            os._exit(128 + number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A command that serves has its own way to end, and takes these over.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminate)
