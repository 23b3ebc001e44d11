# SPDX-License-Identifier: Apache-2.0
"""Tell which kernels of a profile are compiled: AITER's entry is run again, and may only look. Needs no GPU.

A file's name does not tell what kernel is in it, so only AITER and FlyDSL can. What they did not say stays
``unknown``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kimi_k3 import __version__
from kimi_k3.kernels.build import artifacts
from kimi_k3.kernels.entry import RUN_ONLY, environment_of_entry, run_entry, worker_count
from kimi_k3.kernels.report import CheckReport, KernelReport, Presence, Shape, overall
from kimi_k3.kernels.table import write_table
from kimi_k3.kernels.transcript import Failure, Sizes, Transcript
from kimi_k3.kernels.wanted import MASKED_REDUCTION, Wanted

Found = tuple[Presence, str | None]

FIRST_LAUNCHER = "launch_gemm1"


def check(
    wanted: Wanted,
    environment: Mapping[str, str],
    *,
    tell: Callable[[Transcript], None],
    search: Sequence[str] | None = None,
) -> CheckReport:
    """Look for everything that is wanted.

    Args:
        wanted: kernels and directory.
        environment: this process's.
        tell: is called when the number of kernels that were looked at changes.
        search: where Python finds packages, if not in its own way.

    Raises:
        OperatorError: a variable is wrong, or nothing can be started.
    """
    states = _look(wanted, environment, tell=tell, search=search)
    kernels = [
        KernelReport(kernel=kernel, shape=Shape.of(sizes), tokens=tuple(tokens), state=state, why=why)
        for (kernel, sizes), tokens in wanted.kernels.items()
        for state, why in [states(kernel, sizes, tokens)]
    ]
    kernels += [
        KernelReport(
            kernel=MASKED_REDUCTION,
            shape=Shape.of(sizes),
            tokens=tuple(tokens),
            state=Presence.UNKNOWN,
            why="AITER's entry neither compiles it nor looks for it",
        )
        for sizes, tokens in wanted.masked_reductions.items()
    ]
    return CheckReport(
        version=__version__,
        profile=wanted.profile,
        architecture=wanted.gpu.architecture,
        aiter=wanted.aiter.version,
        flydsl=wanted.aiter.flydsl_version,
        directory=str(wanted.directory),
        notes=wanted.notes,
        state=overall(tuple(kernels)),
        kernels=tuple(kernels),
    )


Judge = Callable[[str, Sizes, list[int]], Found]


def _look(
    wanted: Wanted,
    environment: Mapping[str, str],
    *,
    tell: Callable[[Transcript], None],
    search: Sequence[str] | None,
) -> Judge:
    before = artifacts(wanted.directory)
    if not before:
        return _all(Presence.MISSING, f"nothing is compiled in {wanted.directory}")
    if not wanted.aiter.can_only_look:
        return _all(
            Presence.UNKNOWN,
            f"FlyDSL {wanted.aiter.flydsl_version} cannot look without compiling what it does not find",
        )
    transcript = Transcript()
    with tempfile.TemporaryDirectory(prefix="kimi-k3-kernels-") as name:
        directory = Path(name)
        table = directory / f"{wanted.profile}.csv"
        write_table(table, wanted.rows)
        variables = environment_of_entry(
            environment,
            wanted.aiter,
            cache=wanted.directory,
            table=table,
            gpu=wanted.gpu,
            workers=worker_count(environment),
            search=search,
        )

        def take(line: str) -> None:
            if transcript.feed(line):
                tell(transcript)

        code = run_entry(
            ["--csv", str(table), *(["--check"] if wanted.aiter.replays else [])],
            {**variables, RUN_ONLY: "1"},
            directory=directory,
            tell=take,
        )
    if artifacts(wanted.directory) != before:
        return _all(
            Presence.UNKNOWN,
            "the directory changed while it was looked at: by a start or a build, or since this FlyDSL "
            f"compiles in spite of {RUN_ONLY}=1",
        )
    failures = transcript.failures(code, rows=len(wanted.rows), kernels=wanted.jobs)
    rest: Found = (Presence.PRESENT, None)
    unnamed = [failure for failure in failures if not failure.kernels]
    if unnamed or not (code in (0, 1) and transcript.accounted):
        rest = (Presence.UNKNOWN, (unnamed or list(failures))[0].why)
    return _by(failures, rest)


def _all(state: Presence, why: str) -> Judge:
    return lambda kernel, sizes, tokens: (state, why)


def _by(failures: Sequence[Failure], rest: Found) -> Judge:
    def judge(kernel: str, sizes: Sizes, tokens: list[int]) -> Found:
        told = [
            _told(failure, kernel)
            for failure in failures
            if kernel in failure.kernels
            and failure.sizes in (None, sizes)
            and (failure.tokens is None or failure.tokens in tokens)
        ]
        for wanted in (Presence.MISSING, Presence.UNKNOWN):
            for found in told:
                if found[0] is wanted:
                    return found
        return rest

    return judge


def _told(failure: Failure, kernel: str) -> Found:
    """What a failure says of one of its kernels."""
    if failure.missing is None:
        return Presence.UNKNOWN, failure.why
    if len(failure.kernels) == 1:
        return Presence.MISSING, f"{failure.missing} is not in the cache"
    # A row is launched in order and ends at the first that is missing.
    first = kernel == failure.kernels[0]
    if (failure.missing == FIRST_LAUNCHER) is first:
        return Presence.MISSING, f"{failure.missing} is not in the cache"
    if first:
        return Presence.PRESENT, None
    return Presence.UNKNOWN, "the first stage of its row is missing, and AITER looked no further"
