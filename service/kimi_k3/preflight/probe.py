# SPDX-License-Identifier: Apache-2.0
"""Compile AITER's two int4 kernels for gfx942, each in a run of its own: LLVM ends what it cannot serve.

By AITER's own entry, as ``kimi-k3 kernels build`` does. Its older generations compile the kernels that a row
names, so that a row with one name is one stage. The newer one replays whole rows: there both stages are
compiled in each run, one after the other, and what stands in the cache tells how far it came.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kimi_k3.errors import OperatorError
from kimi_k3.kernels.entry import RETRIES, environment_of_entry, run_entry
from kimi_k3.kernels.installed import INSTALL, Aiter, find_aiter
from kimi_k3.kernels.shapes import MoeShape
from kimi_k3.kernels.table import NAMES, Row, kernel_rows, write_table
from kimi_k3.kernels.transcript import Failure, Transcript, ended
from kimi_k3.preflight.finding import Finding, failed, passed, unknown
from kimi_k3.preflight.machine import Machine
from kimi_k3.words.gpus import GPUS

TIMEOUT_SECONDS = 600.0
"""For one kernel, imports of torch and AITER included; a cold compilation was seen to take minutes."""

STAGES = {1: "compile-stage-1", 2: "compile-stage-2"}

GPU = GPUS["mi325x"]
SHAPE = MoeShape(model_dim=3584, inter_dim=3072, experts=112, topk=16, masked=True, tokens=(4096,))
"""Of a rank with expert parallelism over eight GPUs. Without a tuned table it gets AITER's fallback, whose
second stage adds with the instruction that made trouble."""

AGAIN = "look at its whole output: kimi-k3 kernels build --profile ep8"


def check_compile(
    machine: Machine, *, timeout: float = TIMEOUT_SECONDS, cache: Path | None = None
) -> Iterator[Finding]:
    """One finding per stage.

    Args:
        timeout: seconds for each.
        cache: FlyDSL's directory, kept for the same build of AITER: what it compiled there before is not
            compiled again. By default an empty one: a kernel that somebody else compiled would prove nothing.
    """
    lacking = [name for name in ("aiter", "flydsl") if machine.package(name) is None]
    if lacking:
        for check in STAGES.values():
            yield unknown(check, f"nothing can be compiled without {' and '.join(lacking)}", INSTALL)
        return
    for stage, check in STAGES.items():
        if cache is not None and _compiled(cache, stage):
            yield passed(
                check, f"stage {stage} of the int4 kernels was compiled by this AITER before: {cache}"
            )
            continue
        try:
            yield _compile(machine, find_aiter(machine.search), stage, check, timeout, cache)
        except OperatorError as error:
            yield unknown(check, f"stage {stage} could not be tried: {error.what}", error.remedy)


def _compile(
    machine: Machine, aiter: Aiter, stage: int, check: str, timeout: float, cache: Path | None
) -> Finding:
    (row,) = kernel_rows([SHAPE], GPU, {}, one_less=False)
    with tempfile.TemporaryDirectory(prefix="kimi-k3-probe-") as name:
        directory = Path(name)
        cache = directory / "cache" if cache is None else cache
        one = row if aiter.replays else _only(row, stage)
        transcript = Transcript()
        code = _run(machine, aiter, one, directory, cache, transcript, timeout)
        compiled = [_compiled(cache, each) for each in STAGES]
        anything = bool(list(cache.glob("*/*.pkl")))
    failures = transcript.failures(code, rows=1, kernels=len(one.kernels))
    what = f"stage {stage} of the int4 kernels compiles for gfx942: {row.kernels[stage - 1]}"
    if not failures and anything:
        return passed(check, what)
    if aiter.replays:
        if compiled[stage - 1]:
            return passed(check, what)
        if stage == 2 and failures and not compiled[0]:
            return unknown(check, f"stage 2 was not reached: {transcript.reason()}", AGAIN)
    return _finding(check, stage, code, transcript, failures, timeout)


def _finding(
    check: str,
    stage: int,
    code: int | None,
    transcript: Transcript,
    failures: tuple[Failure, ...],
    timeout: float,
) -> Finding:
    reason = transcript.reason()
    if code is None:
        return unknown(check, f"stage {stage} was still compiling after {timeout:.0f} s", AGAIN)
    tried = transcript.total or transcript.crashed or code < 0
    if not tried or any(failure.skipped for failure in failures):
        return unknown(check, f"stage {stage} could not be tried: {reason}", AGAIN)
    how = transcript.crashed or (ended(code) if code < 0 else None)
    if how is not None:
        return failed(check, f"the compiler of stage {stage} for gfx942 {how}: {reason}", INSTALL)
    if not failures:
        return failed(check, f"stage {stage} is told to be compiled, and nothing was written", INSTALL)
    return failed(check, f"stage {stage} cannot be compiled for gfx942: {reason}", INSTALL)


def _compiled(cache: Path, stage: int) -> bool:
    return bool(list(cache.glob(f"launch_gemm{stage}*/*.pkl")))


def _only(row: Row, stage: int) -> Row:
    other = NAMES[2 - stage]
    return replace(row, values={**row.values, other: ""})


def _run(
    machine: Machine,
    aiter: Aiter,
    row: Row,
    directory: Path,
    cache: Path,
    transcript: Transcript,
    timeout: float,
) -> int | None:
    """Exit code, ``None`` after ``timeout``."""
    table = directory / "probe.csv"
    write_table(table, [row])
    environment = environment_of_entry(
        machine.environment, aiter, cache=cache, table=table, gpu=GPU, workers=1, search=machine.search
    )

    def tell(line: str) -> None:
        transcript.feed(line)

    return run_entry(
        ["--csv", str(table)],
        # Once more, since only then AITER tells how the first attempt ended.
        {**environment, RETRIES: "1"},
        directory=directory,
        tell=tell,
        seconds=timeout,
        pause=machine.pause,
    )
