# SPDX-License-Identifier: Apache-2.0
"""Files: read without hanging or filling the memory, written whole or not at all.

A name may lead to a FIFO (opening it waits for a writer that never comes) or to a device (``/dev/zero`` never
ends), through a symlink as well. The lowest room: the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

#: Bytes per further read of a file that is longer than it said.
_CHUNK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class NotRegularFile(OSError):
    """The path leads to a directory, FIFO, device or socket; ``strerror`` says to which."""


class FileTooLarge(OSError):
    """The file holds more than the caller is ready to read; ``strerror`` gives the limit."""


def _require_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise NotRegularFile(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, after following symlinks, for reading; never waits for another process.

    Raises:
        NotRegularFile: it is a directory, a FIFO, a device or a socket.
        OSError: it does not exist or cannot be opened.
    """
    # Before opening, since merely opening some devices has effects and a socket fails with a riddle (ENXIO);
    # and again after, since the name may by then lead elsewhere.
    _require_regular(path.stat().st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_small(path: Path, *, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes; never reads more than one byte beyond.

    Raises:
        NotRegularFile: it is a directory, a FIFO, a device or a socket.
        FileTooLarge: it holds more than ``limit`` bytes.
        OSError: it does not exist or cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Not limit + 1 at once, since Python allocates what it is asked for; and in a loop, since a file may
        # grow and those of /proc have size 0. With O_NONBLOCK some of them answer None for "nothing yet".
        raw = b"" if size > limit else file.read(size + 1) or b""
        while len(raw) <= limit >= size and (more := file.read(min(_CHUNK, limit + 1 - len(raw)))):
            raw += more
    if max(size, len(raw)) > limit:
        raise FileTooLarge(errno.EFBIG, f"it is larger than {limit:,} bytes", os.fspath(path))
    return raw


def write_whole(path: Path, data: bytes) -> None:
    """Write ``path`` by atomic rename: a reader sees the old file or the new one, never a part.

    No fsync: after a power cut the file may be empty.

    Raises:
        OSError: the directory is full, read-only or gone; nothing is left behind.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        # mkstemp gives 0600; other users may read what this one made.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
