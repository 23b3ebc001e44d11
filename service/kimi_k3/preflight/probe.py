# SPDX-License-Identifier: Apache-2.0
"""Compile AITER's two int4 kernels for gfx942, each in its own process: LLVM ends what it cannot serve."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kimi_k3.preflight.aiter_source import INSTALL
from kimi_k3.preflight.finding import Finding, failed, passed, unknown
from kimi_k3.preflight.machine import Machine

CHILD = Path(__file__).with_name("probe_child.py")
CANNOT_ASK = 3
"""Exit code of the child when it does not get as far as compiling."""

TIMEOUT_SECONDS = 600.0
"""For one kernel, imports of torch and AITER included; a cold compilation was seen to take minutes."""

TAIL_BYTES = 64 << 10
ENVIRONMENT = {
    "ARCH": "gfx942",
    "CU_NUM": "304",
    "FLYDSL_GPU_ARCH": "gfx942",
    "GPU_ARCHS": "gfx942",
}
"""Tells AITER and FlyDSL what to compile for where there is no GPU to ask."""

STAGES = {1: "compile-stage-1", 2: "compile-stage-2"}


def check_compile(machine: Machine, *, timeout: float = TIMEOUT_SECONDS) -> Iterator[Finding]:
    """One finding per stage.

    Args:
        timeout: seconds for each.
    """
    lacking = [name for name in ("aiter", "flydsl") if machine.package(name) is None]
    for stage, check in STAGES.items():
        if lacking:
            yield unknown(check, f"nothing can be compiled without {' and '.join(lacking)}", INSTALL)
        else:
            yield _compile(machine, stage, check, timeout)


def _compile(machine: Machine, stage: int, check: str, timeout: float) -> Finding:
    with tempfile.TemporaryDirectory(prefix="kimi-k3-probe-") as cache:
        code, output = _run(machine, stage, Path(cache), timeout)
    reason = _reason(output)
    again = f"look at its whole output: {sys.executable} -P {CHILD} {stage}"
    if code == 0:
        return passed(check, f"stage {stage} of the int4 kernels compiles for gfx942: {reason}")
    if code is None:
        return unknown(check, f"stage {stage} was still compiling after {timeout:.0f} s", again)
    if code == CANNOT_ASK:
        return unknown(check, f"stage {stage} could not be tried: {reason}", again)
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return failed(
            check, f"compiling stage {stage} for gfx942 ended the compiler by {name}: {reason}", INSTALL
        )
    return failed(check, f"stage {stage} cannot be compiled for gfx942: {reason}", INSTALL)


def _run(machine: Machine, stage: int, directory: Path, timeout: float) -> tuple[int | None, str]:
    """Exit code (``None`` after ``timeout``) and the end of what the child wrote."""
    environment = {
        **machine.environment,
        **ENVIRONMENT,
        # An empty cache: a kernel that another process compiled would prove nothing.
        "FLYDSL_RUNTIME_CACHE_DIR": str(directory / "cache"),
    }
    if machine.search is not None:
        environment["PYTHONPATH"] = os.pathsep.join(machine.search)
    with (directory / "output").open("w+b") as output:
        child = subprocess.Popen(
            # Not the script's directory first: modules there are called like others' ("memory", "source").
            [sys.executable, "-P", str(CHILD), str(stage)],
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
        return code, output.read().decode("utf-8", errors="replace")


def _reason(output: str) -> str:
    """The line that says most: LLVM's, else the last one."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    told = (
        [line for line in lines if "LLVM ERROR" in line]
        or [line for line in lines if "[FAIL]" in line]
        or lines
    )
    line = told[-1] if told else "it said nothing"
    return "".join(char if char.isprintable() else "?" for char in line)[:300]
