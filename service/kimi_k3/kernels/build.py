# SPDX-License-Identifier: Apache-2.0
"""Compile what a profile needs, by AITER's own entry, into the directory of this build of AITER."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kimi_k3 import __version__
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.kernels.entry import environment_of_entry, run_entry, worker_count
from kimi_k3.kernels.report import BuildReport, FailureReport
from kimi_k3.kernels.table import write_table
from kimi_k3.kernels.transcript import Failure, Transcript
from kimi_k3.kernels.wanted import Wanted
from kimi_k3.words.text import printable

ARTIFACT = "*.pkl"
_TEMPORARY = ".*.pkl.*.tmp"
_LOCK = ".build.lock"


def build(
    wanted: Wanted,
    environment: Mapping[str, str],
    *,
    tell: Callable[[Transcript], None],
    search: Sequence[str] | None = None,
) -> tuple[BuildReport, tuple[Failure, ...]]:
    """Compile, and report.

    Whatever was compiled stays, also after a failure or a signal: each kernel stands in a file of its own,
    written whole. What FlyDSL had begun to write is removed.

    Args:
        wanted: kernels and directory.
        environment: this process's.
        tell: is called when the number of compiled kernels changes.
        search: where Python finds packages, if not in its own way.

    Raises:
        OperatorError: the directory cannot be used, another build uses it, or a variable is wrong.
    """
    workers = worker_count(environment)
    directory = wanted.directory
    begin = time.monotonic()
    with _alone_in(directory):
        table, log = directory / f"{wanted.profile}.csv", directory / f"{wanted.profile}.log"
        write_table(table, wanted.rows)
        transcript = Transcript()
        with _temporaries_removed(directory), _writing(log) as write:

            def take(line: str) -> None:
                write(line)
                if transcript.feed(line):
                    tell(transcript)

            code = run_entry(
                ["--csv", str(table)],
                environment_of_entry(
                    environment,
                    wanted.aiter,
                    cache=directory,
                    table=table,
                    gpu=wanted.gpu,
                    workers=workers,
                    search=search,
                ),
                directory=directory,
                tell=take,
            )
        failures = transcript.failures(code, rows=len(wanted.rows), kernels=wanted.jobs)
        if not failures and not artifacts(directory):
            failures = (Failure(why=f"it says that all is compiled, and nothing is in {directory}"),)
    report = BuildReport(
        version=__version__,
        profile=wanted.profile,
        architecture=wanted.gpu.architecture,
        aiter=wanted.aiter.version,
        flydsl=wanted.aiter.flydsl_version,
        directory=str(directory),
        notes=wanted.notes,
        state="failed" if failures else "built",
        table=str(table),
        log=str(log),
        rows=len(wanted.rows),
        kernels=len(wanted.kernels),
        seconds=time.monotonic() - begin,
        failures=tuple(FailureReport.of(failure) for failure in failures),
    )
    return report, failures


def artifacts(directory: Path) -> frozenset[Path]:
    """Compiled kernels in a directory of FlyDSL, in either of its layouts."""
    return frozenset(directory.glob(f"*/{ARTIFACT}"))


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except OSError as error:
        raise _unusable(directory, error) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OperatorError(
                printable(f"{directory}: another build is compiling there"),
                remedy="wait for it, or give another --cache-dir",
                exit_code=ExitCode.IN_USE,
            ) from None
        except OSError as error:
            raise _unusable(directory, error) from None
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _temporaries_removed(directory: Path) -> Iterator[None]:
    before = set(directory.glob(f"*/{_TEMPORARY}"))
    try:
        yield
    finally:
        for left in set(directory.glob(f"*/{_TEMPORARY}")) - before:
            with contextlib.suppress(OSError):
                left.unlink()


@contextlib.contextmanager
def _writing(log: Path) -> Iterator[Callable[[str], None]]:
    try:
        file = log.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise _unusable(log, error) from None

    def write(line: str) -> None:
        # A disk that is full is told by FlyDSL's own failure to write; the log must not hide it.
        with contextlib.suppress(OSError):
            file.write(f"{line}\n")
            file.flush()

    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _unusable(path: Path, error: OSError) -> OperatorError:
    return OperatorError(
        printable(f"{path}: cannot be used for kernels ({error.strerror or error})"),
        remedy="give --cache-dir a directory that you may write to",
        exit_code=ExitCode.USAGE,
    )
