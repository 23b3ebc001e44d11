# SPDX-License-Identifier: Apache-2.0
"""``engine.log``: bounded in size, and never a reason to stop serving."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

LOG_FILE = "engine.log"
EARLIER_LOG_FILE = "engine.log.1"
MAX_LOG_BYTES = 32 * 1024 * 1024
RETRY_SECONDS = 5.0


class EngineLog:
    """The engine's log of this start; when it is full, or at a new start, it becomes the earlier one.

    A failing write is handed to ``report`` once; every ``RETRY_SECONDS`` a line tries again, and the first
    that works says so. Lines in between are missing.
    """

    def __init__(
        self, directory: Path, *, report: Callable[[str], None], max_bytes: int = MAX_LOG_BYTES
    ) -> None:
        self._path = directory / LOG_FILE
        self._earlier = directory / EARLIER_LOG_FILE
        self._report = report
        self._max_bytes = max_bytes
        self._stream: TextIO | None = None
        self._size = 0
        self._retry_at: float | None = None
        self._attempt(self._rotate)

    def write(self, line: str) -> None:
        """Append one line."""
        if self._retry_at is not None:
            if time.monotonic() < self._retry_at:
                return
            self._attempt(self._reopen)
        if self._stream is not None:
            self._attempt(lambda: self._append(line))

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._attempt(self._stream.close)
        self._stream = None

    def _append(self, line: str) -> None:
        data = line + "\n"
        size = len(data.encode(errors="replace"))
        if self._size and self._size + size > self._max_bytes:
            self._rotate()
        assert self._stream is not None
        self._stream.write(data)
        self._stream.flush()
        self._size += size

    def _rotate(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._path.exists():
            self._path.replace(self._earlier)
        self._stream = self._path.open("w", encoding="utf-8", errors="replace")
        self._size = 0

    def _reopen(self) -> None:
        stream = self._path.open("a", encoding="utf-8", errors="replace")
        try:
            self._size = stream.tell()
            stream.write(f"[kimi-k3: {self._path.name} could not be written; lines are missing here]\n")
            stream.flush()
        except OSError:
            self._close_quietly(stream)
            raise
        self._stream, self._retry_at = stream, None
        self._report(f"{self._path}: writing works again")

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            stream, self._stream = self._stream, None
            if self._retry_at is None:
                self._report(
                    f"{self._path}: cannot be written: {error.strerror or error}; "
                    "the log goes on to standard output only"
                )
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if stream is not None and not stream.closed:
                self._close_quietly(stream)

    @staticmethod
    def _close_quietly(stream: TextIO) -> None:
        try:
            stream.close()
        except OSError:
            # What could not be written cannot be flushed either; it was reported.
            return
