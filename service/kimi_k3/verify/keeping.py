# SPDX-License-Identifier: Apache-2.0
"""Keeping what a verification finds: on disk at every moment, whatever ends it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.writer import now, write_record
from kimi_k3.terminal import Terminated
from kimi_k3.verify.results import Curve, Figure, Kind, Result, Row, Setting, Subject


class Broken(Exception):
    """The verification cannot go on: the server is gone, or answers no longer; the text is one line."""


class Sheet:
    """A result that grows; each :meth:`note` puts it on disk anew."""

    def __init__(
        self, directory: Path, kind: Kind, subject: Subject, settings: Mapping[str, Setting]
    ) -> None:
        self.path = directory / f"{kind}.json"
        self.result = Result(kind=kind, subject=subject, settings=dict(settings), began=now())
        self.note()

    def note(
        self,
        *,
        rows: Sequence[Row] | None = None,
        figures: Sequence[Figure] | None = None,
        curves: Sequence[Curve] | None = None,
        broken_off: str | None = None,
    ) -> None:
        """Set what is given, keep the rest, and write.

        Raises:
            OperatorError: the directory takes no file.
        """
        given = {"rows": rows, "figures": figures, "curves": curves}
        update: dict[str, object] = {name: tuple(value) for name, value in given.items() if value is not None}
        if broken_off is not None:
            update["broken_off"] = broken_off
        self.result = self.result.model_copy(update=update)
        self._write()

    def end(self) -> None:
        """It came to its end."""
        self.result = self.result.with_end(now())
        self._write()

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_record(self.path.parent, self.path.name, self.result)
        except OSError as error:
            raise OperatorError(
                f"--out {self.path.parent}: cannot write {self.path.name}: {error.strerror or error}",
                remedy="give a writable directory with --out",
            ) from None


@contextmanager
def kept(directory: Path, kind: Kind, subject: Subject, settings: Mapping[str, Setting]) -> Iterator[Sheet]:
    """A sheet for a verification; what breaks it off is written down, too.

    Raises:
        OperatorError: the block raised :class:`Broken`; names the file with what was measured.
    """
    sheet = Sheet(directory, kind, subject, settings)
    try:
        yield sheet
    except Broken as error:
        sheet.note(broken_off=str(error))
        raise OperatorError(
            f"verify {kind}: {error}",
            remedy=f"look at the server's log and run it again; what was measured is in {sheet.path}",
        ) from None
    except BaseException as error:
        # A Ctrl-C or a SIGTERM, too: both are exceptions here, and what was measured is worth as much.
        sheet.note(broken_off=_why(error))
        raise
    sheet.end()


def _why(error: BaseException) -> str:
    match error:
        case KeyboardInterrupt():
            return "interrupted from the keyboard"
        case Terminated():
            return f"ended by {error}"
        case OperatorError():
            return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """The directory of the results, there and for this process alone.

    Two runs in one directory would take each other's files for their own.

    Raises:
        OperatorError: it cannot be made, another verification is in it, or what it holds is no result.
    """
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OperatorError(
            f"--out {directory}: {error.strerror or error}", remedy="give a writable directory with --out"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OperatorError(
                f"--out {directory}: another verification writes into it",
                remedy="wait until that one has ended, or give another directory with --out",
            ) from None
        except OSError:
            pass  # A file system without locks: as without this one.
        read_results(directory)
        yield
    finally:
        os.close(descriptor)
        if made:
            with contextlib.suppress(OSError):
                directory.rmdir()  # Only if nothing is in it.


def read_results(directory: Path) -> list[Result]:
    """The results in ``directory``, in the order of :class:`Kind`.

    Raises:
        OperatorError: a file of such a name holds something else.
    """
    found = []
    for kind in Kind:
        path = directory / f"{kind}.json"
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OperatorError(
                f"{path}: cannot be read: {error.strerror or error}", remedy="make it readable"
            ) from None
        try:
            found.append(Result.model_validate_json(text))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise OperatorError(
                f"{path}: is no result of this version: {where}: {first['msg']}",
                remedy="move it away, or give another directory with --out",
                exit_code=ExitCode.USAGE,
            ) from None
    return found
