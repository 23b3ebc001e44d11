# SPDX-License-Identifier: Apache-2.0
"""A double of amdsmi: eight GPUs of the architecture that the test names."""

from __future__ import annotations

import os

ARCHITECTURE = os.environ.get("DOUBLE_ARCHITECTURE", "gfx942")


class AmdSmiException(Exception):
    """Never raised here."""


class AmdSmiMemoryType:
    VRAM = 0


def amdsmi_init(flag: int = 0) -> None: ...


def amdsmi_shut_down() -> None: ...


def amdsmi_get_processor_handles() -> list[int]:
    return list(range(8))


def amdsmi_get_gpu_asic_info(handle: int) -> dict[str, str]:
    return {
        "market_name": "AMD Instinct MI325X",
        "device_id": "0x74a5",
        "target_graphics_version": ARCHITECTURE,
    }


def amdsmi_get_gpu_device_uuid(handle: int) -> str:
    return f"double-{handle}"


def amdsmi_get_gpu_memory_total(handle: int, kind: int) -> int:
    return 256 << 30


def amdsmi_topo_get_link_type(first: int, second: int) -> dict[str, int]:
    return {"hops": 1, "type": 2}


def amdsmi_topo_get_numa_node_number(handle: int) -> int:
    return handle // 4
