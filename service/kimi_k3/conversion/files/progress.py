# SPDX-License-Identifier: Apache-2.0
"""What a report has found so far, on disk: JSON lines, a header and then one projection each.

A line is written when its projection is finished, so being killed at any time costs the projection at work.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from kimi_k3.conversion.files.atomic import not_written
from kimi_k3.conversion.files.models import ProgressHeader, ProgressLine, ProjectionReport
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.given import given_path
from kimi_k3.words.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kimi_k3.words.weights import Projection

MAX_BYTES: Final = 16 << 20
"""A thousand layers need one megabyte."""

_MARK: Final = b'{"kind":"kimi-k3 convert-report"'
"""How every version's header begins."""


def progress_path(json_file: Path | None, header: ProgressHeader) -> Path:
    """Beside the report's JSON file; without one in ``$XDG_CACHE_HOME/kimi-k3``, else ``~/.cache/kimi-k3``.

    Raises:
        OperatorError: there is no home directory, or the cache directory cannot be made.
    """
    if json_file is not None:
        return json_file.with_name(f"{json_file.name}.partial")
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = (
            given_path("environment variable XDG_CACHE_HOME", named, absolute=True)
            if named
            else given_path("home directory", str(Path.home())) / ".cache"
        )
    except RuntimeError:
        raise OperatorError(
            f"user {os.getuid()} has no home directory to keep the progress in",
            remedy="set XDG_CACHE_HOME, or name a file with --json",
            exit_code=ExitCode.USAGE,
        ) from None
    directory = cache / "kimi-k3"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperatorError(
            f"{printable(str(directory))} cannot be made to keep the progress in ({error.strerror or error})",
            remedy="set XDG_CACHE_HOME to a directory you may write to, or name a file with --json",
        ) from None
    asked = header.requantisation
    signs = "both-signs" if asked.negative_scale else "positive"
    report = hashlib.sha256(_figures(header).model_dump_json().encode()).hexdigest()[:16]
    return directory / f"convert-report-{report}-{asked.rule}-{signs}.partial"


class ProgressFile:
    """The file, open and locked; ``done`` holds the projections that an earlier run has finished."""

    def __init__(
        self,
        path: Path,
        header: ProgressHeader,
        *,
        resume: bool,
        shards_of: Callable[[int, Projection], str | None],
        notice: Callable[[str], None],
    ) -> None:
        """Open it, or begin one.

        Args:
            resume: whether to keep what an earlier run has found.
            shards_of: see :meth:`ExpertFiles.shards_of`; what was measured in other files is not kept.
            notice: told in one line of anything in the file that is not used.

        Raises:
            OperatorError: another process writes it, it is some other file or of another report, or it cannot
                be written.
        """
        self.path = path
        self._shards_of = shards_of
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise not_written(path, error) from None
        try:
            self._lock()
            self.done = self._begin(header, resume=resume, notice=notice)
        except OSError as error:
            self.close()
            raise not_written(path, error) from None
        except BaseException:
            self.close()
            raise

    def append(self, part: ProjectionReport, shards: str | None) -> None:
        """Add a finished projection; it is on disk when this returns.

        Raises:
            OperatorError: it cannot be written.
        """
        try:
            self._write(ProgressLine(shards=shards or "", part=part).model_dump_json())
        except OSError as error:
            raise not_written(self.path, error) from None

    def remove(self) -> None:
        """Delete the file: the report is complete.

        Raises:
            OperatorError: it cannot be deleted.
        """
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise not_written(self.path, error) from None

    def close(self) -> None:
        """Give up the file and its lock."""
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use() from None
        # The report that held it may have finished meanwhile, and deleted the name.
        if not self.path.exists() or not os.path.samestat(os.fstat(self._file), self.path.stat()):
            raise self._in_use()

    def _in_use(self) -> OperatorError:
        return OperatorError(
            f"{printable(str(self.path))} is in use by another convert-report",
            remedy="wait for it, or name another file with --json",
            exit_code=ExitCode.IN_USE,
        )

    def _begin(
        self, header: ProgressHeader, *, resume: bool, notice: Callable[[str], None]
    ) -> tuple[ProjectionReport, ...]:
        status = os.fstat(self._file)
        raw = os.pread(self._file, MAX_BYTES, 0) if stat.S_ISREG(status.st_mode) else b"?"
        if status.st_size > MAX_BYTES or not raw.startswith(_MARK[: len(raw)]):
            raise OperatorError(
                f"{printable(str(self.path))} is no progress file of convert-report; it is left alone",
                remedy="move it away, or name another file with --json",
                exit_code=ExitCode.USAGE,
            )
        found, valid, done = parse(raw)
        if not resume or found is None or _figures(found) != _figures(header):
            if resume and found is not None and done:
                raise OperatorError(
                    f"{printable(str(self.path))} holds {len(done)} projections of another report "
                    f"({_difference(found, header)})",
                    remedy="repeat that command to finish it, or give --no-resume to throw them away",
                    exit_code=ExitCode.USAGE,
                )
            valid, done = 0, ()
        elif valid < len(raw):
            notice(f"{self.path}: its last {len(raw) - valid} bytes are half-written and are ignored")
        os.ftruncate(self._file, valid)
        os.lseek(self._file, 0, os.SEEK_END)
        if not valid:
            self._write(header.model_dump_json())
        same = [line for line in done if self._shards_of(*_key(line)) in (None, line.shards)]
        if len(same) < len(done):
            notice(f"{len(done) - len(same)} projections are measured again: their shards have changed")
        # A report that stops at such groups does not take over what one that counts them has passed.
        allowed = header.requantisation.allow_nonfinite
        return tuple(line.part for line in same if allowed or line.part.loss.nonfinite_groups == 0)

    def _write(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode())
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)


def _key(line: ProgressLine) -> tuple[int, Projection]:
    return line.part.layer, line.part.projection


def _figures(header: ProgressHeader) -> ProgressHeader:
    """The header of all reports with the same figures: whether other groups stop one changes none."""
    strict = header.requantisation.model_copy(update={"allow_nonfinite": False})
    return header.model_copy(update={"requantisation": strict})


def _difference(found: ProgressHeader, wanted: ProgressHeader) -> str:
    """What differs between two reports, in words."""
    ours = wanted.model_dump(exclude={"requantisation"}) | wanted.requantisation.model_dump()
    theirs = found.model_dump(exclude={"requantisation"}) | found.requantisation.model_dump()
    return ", ".join(f"{name} {theirs[name]}" for name in ours if theirs[name] != ours[name])


def parse(raw: bytes) -> tuple[ProgressHeader | None, int, tuple[ProgressLine, ...]]:
    """What a progress file says.

    Returns:
        Its header, if it has a whole one; how many of its bytes are whole and valid lines; their projections.
    """
    header: ProgressHeader | None = None
    valid, done = 0, []
    for line in raw.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            if header is None:
                header = ProgressHeader.model_validate_json(line)
            else:
                done.append(ProgressLine.model_validate_json(line))
        except ValidationError:
            break
        valid += len(line)
    return header, valid, tuple(done)
