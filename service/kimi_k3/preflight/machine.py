# SPDX-License-Identifier: Apache-2.0
"""This machine, as the checks see it: files below a root, an environment, an identity.

Everything that is asked of the system goes through here, so that a test hands the checks another machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kimi_k3.files import read_small
from kimi_k3.kernels.installed import find_package, find_version

MAX_TEXT_BYTES = 16 << 20
"""Of one file in /proc or /sys: mountinfo of a node with thousands of mounts has a few MB."""


@dataclass(frozen=True)
class Space:
    """A file system's size and what is free of it, in bytes."""

    total: int
    free: int


def disk_space(path: Path) -> Space:
    """Size of the file system at ``path``.

    Raises:
        OSError: there is none.
    """
    found = os.statvfs(path)
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def open_device(path: Path) -> None:
    """Open a device for reading and writing, as ROCm does, and close it again.

    Raises:
        OSError: it cannot be opened.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))


def pause(seconds: float) -> bool:
    """Sleep; ``True``: go on waiting."""
    time.sleep(seconds)
    return True


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine.

    Attributes:
        root: where ``/proc``, ``/sys``, ``/dev`` and all absolute paths begin.
        environment: that vLLM's processes would inherit.
        uid: of this process.
        groups: its numeric groups, the primary one as well.
        cores: CPU cores that it may use.
        search: where Python looks for packages; ``None`` for this Python's own way.
        space: see :func:`disk_space`.
        opens: see :func:`open_device`.
        pause: sleeps some seconds and says whether to go on waiting.
        clock: seconds of a clock that only runs forward.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    uid: int = field(default_factory=os.geteuid)
    groups: frozenset[int] = field(default_factory=lambda: frozenset({os.getegid(), *os.getgroups()}))
    cores: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    search: tuple[str, ...] | None = None
    space: Callable[[Path], Space] = disk_space
    opens: Callable[[Path], None] = open_device
    pause: Callable[[float], bool] = pause
    clock: Callable[[], float] = time.monotonic

    def path(self, absolute: str | Path) -> Path:
        """Where the file is that the machine calls ``absolute``."""
        return self.root / str(absolute).lstrip("/")

    def text(self, absolute: str | Path) -> str | None:
        """What a small file holds; ``None`` if it cannot be read."""
        try:
            raw = read_small(self.path(absolute), limit=MAX_TEXT_BYTES)
        except (OSError, ValueError):
            return None
        return raw.decode("utf-8", errors="replace")

    def number(self, absolute: str | Path) -> int | None:
        """The one number that a small file holds."""
        text = (self.text(absolute) or "").strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None

    def package(self, name: str) -> Path | None:
        """Directory of a top-level package, found without importing it."""
        return find_package(name, self.search)

    def version(self, *distributions: str) -> str | None:
        """Version of the first installed one of ``distributions``."""
        return find_version(*distributions, search=self.search)
