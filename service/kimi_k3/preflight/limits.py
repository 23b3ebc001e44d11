# SPDX-License-Identifier: Apache-2.0
"""Limits of this process that its children inherit (``ulimit``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kimi_k3.preflight.finding import Finding, passed, unknown, warned
from kimi_k3.preflight.machine import Machine

LIMITS = "/proc/self/limits"
UNLIMITED = "unlimited"


@dataclass(frozen=True)
class Wanted:
    """What one limit should be.

    Attributes:
        check: name of the check.
        title: how the kernel calls it.
        least: bytes or number; ``None`` for no limit at all.
        hard: whether the hard limit is what counts.
        flag: of docker.
        why: what happens otherwise.
    """

    check: str
    title: str
    least: int | None
    hard: bool
    flag: str
    why: str


WANTED = (
    Wanted(
        "limit-memlock",
        "Max locked memory",
        None,
        False,
        "--ulimit memlock=-1",
        "RCCL and RDMA pin the memory that they transfer",
    ),
    Wanted(
        "limit-nofile",
        "Max open files",
        65535,
        True,
        "--ulimit nofile=65535",
        "vLLM raises its own limit to 65535 and cannot go beyond this",
    ),
    Wanted(
        "limit-stack",
        "Max stack size",
        67108864,
        False,
        "--ulimit stack=67108864",
        "published starts on gfx942 set 64 MiB, and nobody tells how much the compilers need",
    ),
)
"""As ROCm/MAD starts its containers, and as vllm/utils/system_utils.py has it."""

_COLUMNS = re.compile(r"(?P<title>\S+(?: \S+)*) {2,}(?P<soft>\S+) +(?P<hard>\S+)")


def parse_limits(text: str) -> dict[str, tuple[int | None, int | None]]:
    """Soft and hard limits by name; ``None`` is no limit. Lines of another form are passed over."""
    found = {}
    for line in text.splitlines():
        if match := _COLUMNS.match(line):
            values = [match["soft"], match["hard"]]
            if all(value == UNLIMITED or (value.isascii() and value.isdigit()) for value in values):
                soft, hard = (None if value == UNLIMITED else int(value[:20]) for value in values)
                found[match["title"]] = (soft, hard)
    return found


def check_limits(machine: Machine) -> Iterator[Finding]:
    """What published starts had, for those that vLLM cannot raise by itself."""
    limits = parse_limits(machine.text(LIMITS) or "")
    for wanted in WANTED:
        if wanted.title not in limits:
            yield unknown(wanted.check, f"{LIMITS} does not tell", f"start the container with {wanted.flag}")
            continue
        value = limits[wanted.title][wanted.hard]
        if value is None or (wanted.least is not None and value >= wanted.least):
            yield passed(wanted.check, UNLIMITED if value is None else f"{value:,}")
        else:
            least = UNLIMITED if wanted.least is None else f"{wanted.least:,}"
            yield warned(
                wanted.check,
                f"{wanted.title[4:]} is limited to {value:,}, should be {least}: {wanted.why}",
                f"docker: {wanted.flag}; Kubernetes: the container runtime's defaults on the node",
            )
