# SPDX-License-Identifier: Apache-2.0
"""What this machine computes on, in words, for whoever reads a measurement later."""

from __future__ import annotations

from kimi_k3.preflight.gpus import described
from kimi_k3.preflight.kfd import read_gpus
from kimi_k3.preflight.machine import Machine

CPUS = "/proc/cpuinfo"
MAX_CHARACTERS = 256


def hardware(machine: Machine, *, on_gpus: bool) -> str | None:
    """The GPUs that the engine may use, or the CPU; ``None`` if the kernel does not tell."""
    if on_gpus:
        gpus = read_gpus(machine).usable
        return described(gpus)[:MAX_CHARACTERS] if gpus else None
    named = _cpu(machine)
    return None if named is None else f"{len(machine.cores)} cores of {named}"[:MAX_CHARACTERS]


def _cpu(machine: Machine) -> str | None:
    for line in (machine.text(CPUS) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part") and value.strip():
            return (
                " ".join(value.split()) if name.strip() == "model name" else f"Arm CPU part {value.strip()}"
            )
    return None
