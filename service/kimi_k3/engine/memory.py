# SPDX-License-Identifier: Apache-2.0
"""Memory of this process: the accelerator's where there is one, else its resident set."""

from __future__ import annotations

from pathlib import Path

import torch

from kimi_k3.journal.models import MemoryReading

_STATUS = Path("/proc/self/status")


def read_memory() -> MemoryReading | None:
    """The present reading, or ``None`` where the platform tells nothing."""
    if torch.accelerator.is_available():
        free, total = torch.accelerator.get_memory_info()
        return MemoryReading(
            kind="device",
            used_bytes=total - free,
            peak_bytes=torch.accelerator.max_memory_allocated(),
            total_bytes=total,
        )
    return _host_memory(_STATUS)


def _host_memory(status: Path) -> MemoryReading | None:
    """Resident set and its peak from ``/proc/PID/status`` (fields VmRSS and VmHWM, in KiB)."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    kib = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in lines)
        if name in ("VmRSS", "VmHWM")
    }
    if "VmRSS" not in kib:
        return None
    return MemoryReading(
        kind="host",
        used_bytes=kib["VmRSS"] * 1024,
        peak_bytes=kib["VmHWM"] * 1024 if "VmHWM" in kib else None,
    )
