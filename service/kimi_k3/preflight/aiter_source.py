# SPDX-License-Identifier: Apache-2.0
"""The installed AITER and FlyDSL: there, and fit for int4 on gfx942. They are not imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.contract import source
from kimi_k3.kernels.installed import INSTALL, aiter_version
from kimi_k3.preflight.finding import Finding, State, failed, passed, unknown
from kimi_k3.preflight.machine import Machine

PRESENT, FLYDSL, ACTIVATION, WINDOW = "aiter", "flydsl", "aiter-activation", "aiter-version"
KERNELS = "ops/flydsl/kernels"
MODULE = "moe_2stage_a16wmix"
FUNCTION = "flydsl_a16w4_gemm1"
PARAMETER = "act"
PROBE = "let it be compiled: kimi-k3 preflight --probe-compile"

Key = tuple[int, int, int, int]


@dataclass(frozen=True)
class Range:
    """Versions of AITER from ``begin`` (a pre-release has -1 as its last number) to the next row's.

    Attributes:
        begin: major, minor, patch, post-release.
        state: what is known of them on gfx942 with int4.
        why: and from where.
    """

    begin: Key
    state: State
    why: str


RANGES = (
    Range(
        (0, 0, 0, -1),
        State.FAIL,
        "its int4 kernels do not take the activation of Kimi-K3 (before ROCm/aiter#4646)",
    ),
    Range((0, 1, 20, -1), State.UNKNOWN, "it may be from before ROCm/aiter#4646"),
    Range((0, 1, 20, 0), State.PASS, "stage 2 adds with an instruction that gfx942 has"),
    Range(
        (0, 1, 21, -1),
        State.UNKNOWN,
        "it may be from between ROCm/aiter#4879 (2026-08-21) and #5240 (2026-09-09), when stage 2 was made "
        "with an instruction that only gfx950 has, and LLVM ends the process",
    ),
    Range((0, 1, 21, 2), State.PASS, "the author of vLLM's int4 path reported it working on MI325X"),
    Range(
        (0, 1, 22, -1),
        State.UNKNOWN,
        "nobody reported whether it has ROCm/aiter#5240, without which LLVM ends it",
    ),
    Range((0, 1, 23, 0), State.PASS, "released after ROCm/aiter#5240"),
)
"""In order. What is said of releases follows from their dates where nobody tried them."""


def check_aiter(machine: Machine, *, int4: bool) -> Iterator[Finding]:
    """AITER as a start with AITER needs it; with ``int4`` also what gfx942's int4 kernels need."""
    package = machine.package("aiter")
    if package is None:
        yield failed(PRESENT, "AITER is not installed in this Python environment", INSTALL)
        return
    version = aiter_version(package, machine.search)
    yield passed(PRESENT, f"AITER {version or 'of unknown version'} in {package}")
    if int4:
        flydsl = machine.package("flydsl")
        if flydsl is None:
            yield failed(
                FLYDSL, "FlyDSL, which AITER's int4 kernels are written in, is not installed", INSTALL
            )
        else:
            yield passed(FLYDSL, f"FlyDSL {machine.version('flydsl') or 'of unknown version'} in {flydsl}")
        yield check_activation(package)
        yield check_version(version)


def check_activation(package: Path) -> Finding:
    """The first stage takes the activation; without that parameter it would compute SiLU, without a word."""
    files = [package / KERNELS / f"{MODULE}.py", *sorted((package / KERNELS / MODULE).glob("*.py"))]
    for file in files:
        tree = source.parse(file)
        node = None if isinstance(tree, str) else source.find(tree, FUNCTION)
        if node is None or not (taken := source.parameters(node)):
            continue
        where = file.relative_to(package)
        if PARAMETER in taken:
            return passed(ACTIVATION, f"{FUNCTION} in {where} takes {PARAMETER}")
        return failed(
            ACTIVATION,
            f"{FUNCTION} in {where} takes no {PARAMETER}: it would compute SiLU instead of SiTU",
            INSTALL,
        )
    return failed(
        ACTIVATION, f"{package / KERNELS} has no {MODULE} with {FUNCTION}: AITER is 0.1.19 or older", INSTALL
    )


def check_version(version: str | None) -> Finding:
    """Not one whose second stage cannot be compiled for gfx942."""
    key = None if version is None else parse_version(version)
    if key is None:
        return unknown(WINDOW, f"AITER does not tell its version ({version!r})", PROBE)
    row = next(each for each in reversed(RANGES) if each.begin <= key)
    what = f"AITER {version}: {row.why}"
    if row.state is State.PASS:
        return passed(WINDOW, what)
    return failed(WINDOW, what, INSTALL) if row.state is State.FAIL else unknown(WINDOW, what, PROBE)


def parse_version(version: str) -> Key | None:
    """The numbers of a version; pre-releases and builds between releases come before their release."""
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(?:\.post(\d{1,6}))?(.*)", version.strip(), re.DOTALL)
    if match is None:
        return None
    major, minor, patch, post, rest = match.groups()
    early = re.match(r"\.?(dev|rc|a|b)\d", rest) is not None
    return int(major), int(minor), int(patch), -1 if early else int(post or 0)
