# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, as the kernel driver tells of them in ``/sys``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.preflight.machine import Machine

NODES = "/sys/class/kfd/kfd/topology/nodes"
PROCESSES = "/sys/class/kfd/kfd/proc"
RENDER = "/sys/class/drm/renderD{}/device"


@dataclass(frozen=True)
class GpuNode:
    """One GPU that this process may use, or one partition of a GPU.

    Attributes:
        node: its number in KFD's topology.
        architecture: LLVM's name, e.g. ``gfx942``.
        device_id: PCI device id, four hexadecimal digits; ``None`` if the driver does not tell.
        render_minor: number of its ``/dev/dri/renderD*``.
        compute_partition, memory_partition: e.g. ``SPX`` and ``NPS1``; ``None`` if the driver does not tell.
        vram_total, vram_used: bytes; ``None`` if the driver does not tell.
    """

    node: int
    architecture: str
    device_id: str | None
    render_minor: int | None
    compute_partition: str | None
    memory_partition: str | None
    vram_total: int | None
    vram_used: int | None

    @property
    def name(self) -> str:
        """How it is called in a message."""
        return f"node {self.node}" if self.render_minor is None else f"renderD{self.render_minor}"


@dataclass(frozen=True)
class Gpus:
    """What the topology says.

    Attributes:
        present: whether there is a topology at all.
        usable: GPUs whose properties this process may read: the others are kept from it by a device cgroup.
        hidden: how many there are that it may not read.
    """

    present: bool
    usable: tuple[GpuNode, ...]
    hidden: int


def read_gpus(machine: Machine) -> Gpus:
    """Read KFD's topology and what the graphics driver says of each GPU in it."""
    numbers = sorted(int(name) for name in _names(machine, NODES) if name.isascii() and name.isdigit())
    usable, hidden = [], 0
    for number in numbers:
        text = machine.text(f"{NODES}/{number}/properties")
        if text is None:
            # The kernel answers EPERM for a GPU that the device cgroup withholds.
            hidden += 1
        elif version := (properties := parse_properties(text)).get("gfx_target_version"):
            usable.append(_node(machine, number, properties, version))
    return Gpus(present=bool(numbers), usable=tuple(usable), hidden=hidden)


def parse_properties(text: str) -> dict[str, int]:
    """Lines of a name and a whole number; others are passed over."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if value.isascii() and value.isdigit() and len(value) < 21:
            found[name] = int(value)
    return found


def architecture(version: int) -> str:
    """LLVM's name of KFD's ``gfx_target_version``: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def processes(machine: Machine) -> tuple[int, ...]:
    """Processes that use any GPU, of all containers, by the numbers that the host gives them."""
    return tuple(
        sorted(int(name) for name in _names(machine, PROCESSES) if name.isascii() and name.isdigit())
    )


def used_bytes(machine: Machine, gpu: GpuNode) -> int | None:
    """Memory of a GPU that is in use now."""
    if gpu.render_minor is None:
        return None
    return machine.number(f"{RENDER.format(gpu.render_minor)}/mem_info_vram_used")


def _node(machine: Machine, number: int, properties: Mapping[str, int], version: int) -> GpuNode:
    minor = properties.get("drm_render_minor")
    minor = minor if minor is not None and minor > 0 else None
    device = None if minor is None else RENDER.format(minor)
    told = properties.get("device_id")
    return GpuNode(
        node=number,
        architecture=architecture(version),
        device_id=f"{told:04x}" if told else None,
        render_minor=minor,
        compute_partition=_word(machine, device, "current_compute_partition"),
        memory_partition=_word(machine, device, "current_memory_partition"),
        vram_total=None if device is None else machine.number(f"{device}/mem_info_vram_total"),
        vram_used=None if device is None else machine.number(f"{device}/mem_info_vram_used"),
    )


def _word(machine: Machine, device: str | None, name: str) -> str | None:
    text = None if device is None else machine.text(f"{device}/{name}")
    return (text or "").strip()[:40] or None


def _names(machine: Machine, directory: str) -> list[str]:
    try:
        return [path.name for path in Path(machine.path(directory)).iterdir()]
    except OSError:
        return []
