# SPDX-License-Identifier: Apache-2.0
"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def require_place(flag: str, path: Path, *, written_by: str, is_ours: Callable[[Path], bool]) -> None:
    """Refuse a path to which :func:`replacing` cannot or should not write, before hours of work depend on it.

    Args:
        flag: what gave the path, for messages.
        written_by: the command, for messages.
        is_ours: whether an existing file is a result of that command, and may be replaced by another.

    Raises:
        OperatorError: its directory does not exist or cannot be looked into; it is itself a directory, a link
            or a device; or it is a file of somebody else, such as a shard.
    """
    try:
        _require_place(flag, path)
        foreign = path.exists() and path.stat().st_size > 0 and not is_ours(path)
    except OSError as error:
        raise not_written(path, error) from None
    if foreign:
        raise OperatorError(
            f"{flag} {printable(str(path))}: is not a result of {written_by}, and is not replaced",
            remedy="move it away, or name another file",
            exit_code=ExitCode.USAGE,
        )


def _require_place(flag: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise OperatorError(
            f"{flag} {printable(str(path))}: there is no directory {printable(str(path.parent))}",
            remedy="make that directory, or name a file in one that exists",
            exit_code=ExitCode.USAGE,
        )
    if path.is_dir():
        raise OperatorError(
            f"{flag} {printable(str(path))}: is a directory",
            remedy="name a file in it",
            exit_code=ExitCode.USAGE,
        )
    # Replacing would put a file in the place of a device or of a link, not write through it.
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OperatorError(
            f"{flag} {printable(str(path))}: is a link or a device, which is not replaced",
            remedy="name a file",
            exit_code=ExitCode.USAGE,
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that becomes ``path`` when the block ends, and vanishes when the block fails.

    Raises:
        OperatorError: it cannot be written, e.g. since the disk is full; any OSError of the block counts.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            yield stream
            # Else a power cut could leave an empty file under the final name.
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp gives 0600; other users may read what this one made.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
        temporary = None
    except OSError as error:
        raise not_written(path, error) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def not_written(path: Path, error: OSError) -> OperatorError:
    """The error for a file that cannot be written."""
    return OperatorError(
        f"{printable(str(path))} cannot be written ({error.strerror or error})",
        remedy="free some space, or name a file in a directory you may write to",
    )
