# SPDX-License-Identifier: Apache-2.0
"""Memory as the kernel sees it: ``/proc/meminfo`` and the process's own control group.

The control group is that of the process that asks. Where sidecar and engine run in one container it is the
group of both, and that is where a load that fills shared memory gets killed although no process looks large.
A container sees its own group at the root of the mount, a process on the host by its path; so every level
from the path up to the root is looked at, and the one with the tightest limit is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
SYSFS = Path("/sys")

_MAX = 2**63
# Version 1 has no word for "no limit"; it shows the largest number of whole pages.
_V1_UNLIMITED = 2**60


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HostMemory(_Model):
    """Memory of the whole machine, from ``/proc/meminfo``, in bytes."""

    total_bytes: int | None
    available_bytes: int | None = Field(description="What can be had without swapping.")
    shmem_bytes: int | None = Field(description="Shared memory, /dev/shm and tmpfs included.")


class CgroupMemory(_Model):
    """Memory of the asking process's control group, in bytes."""

    version: Literal[1, 2]
    path: str = Field(description="The group that sets the tightest limit, below the cgroup mount.")
    limited: bool = Field(description="Whether any limit is set at all.")
    limit_bytes: int | None = Field(description="The kernel kills above this; null without a limit.")
    used_bytes: int | None = Field(description="In use now, page cache and shared memory included.")
    peak_bytes: int | None = Field(description="The most that was ever in use.")
    shmem_bytes: int | None = Field(description="Shared memory, which counts towards the limit.")
    oom_kills: int | None = Field(description="Processes that the kernel killed for memory.")


class DeviceMemory(_Model):
    """Memory of one GPU as its driver counts it, whoever uses it, in bytes."""

    name: str = Field(description="The kernel's name of the device, e.g. card1.")
    vram_used_bytes: int | None
    vram_total_bytes: int


class CgroupUse(_Model):
    """What a control group's memory is used for, in bytes; null is what the kernel does not tell."""

    anon: int | None = Field(description="Of processes; only ending them frees it.")
    file: int | None = Field(
        description="Page cache, which the kernel gives back under pressure; without shared memory."
    )
    shmem: int | None = Field(description="Shared memory, which stays until its files are removed.")


@dataclass(frozen=True)
class Places:
    """Where the kernel's files are; tests put others there."""

    proc: Path = PROC
    cgroup: Path = CGROUP
    sysfs: Path = SYSFS


@dataclass(frozen=True)
class MachineMemory:
    """Memory of the machine, of the control group and of the GPUs, at one moment."""

    host: HostMemory
    cgroup: CgroupMemory | None
    cgroup_use: CgroupUse | None
    devices: tuple[DeviceMemory, ...]


def read_machine_memory(places: Places) -> MachineMemory:
    """All of it; what cannot be read is ``None`` or not there."""
    cgroup = read_cgroup_memory(places.proc, places.cgroup)
    return MachineMemory(
        host=read_host_memory(places.proc),
        cgroup=cgroup,
        cgroup_use=None if cgroup is None else read_cgroup_use(cgroup, places.cgroup),
        devices=tuple(read_devices(places.sysfs)),
    )


def read_cgroup_use(memory: CgroupMemory, cgroup: Path = CGROUP) -> CgroupUse:
    """What the group that :func:`read_cgroup_memory` found is used for."""
    v1 = memory.version == 1
    stat = _table((cgroup / "memory" if v1 else cgroup) / memory.path.lstrip("/") / "memory.stat")
    anon, file = (
        (stat.get("total_rss"), stat.get("total_cache")) if v1 else (stat.get("anon"), stat.get("file"))
    )
    shmem = memory.shmem_bytes
    # Both versions count shared memory as page cache, too.
    return CgroupUse(anon=anon, file=None if file is None else max(0, file - (shmem or 0)), shmem=shmem)


def read_host_memory(proc: Path = PROC) -> HostMemory:
    """Read ``/proc/meminfo``; what cannot be read is ``None``."""
    fields = _table(proc / "meminfo")
    kib = {name.rstrip(":"): value for name, value in fields.items()}

    def size(name: str) -> int | None:
        return kib[name] * 1024 if name in kib else None

    return HostMemory(
        total_bytes=size("MemTotal"), available_bytes=size("MemAvailable"), shmem_bytes=size("Shmem")
    )


def read_cgroup_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> CgroupMemory | None:
    """Read the process's control group, version 1 or 2; ``None`` when there is none to be seen."""
    unified = None
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return _tightest(cgroup / "memory", path, _read_v1)
        if controllers == "":
            unified = path
    return None if unified is None else _tightest(cgroup, unified, _read_v2)


def read_devices(sysfs: Path = SYSFS) -> list[DeviceMemory]:
    """The GPUs of the amdgpu driver; empty where there is none."""
    devices = []
    for total in sorted(sysfs.glob("class/drm/card[0-9]*/device/mem_info_vram_total")):
        size = _number(total)
        if size is not None:
            used = _number(total.with_name("mem_info_vram_used"))
            devices.append(
                DeviceMemory(name=total.parents[1].name, vram_used_bytes=used, vram_total_bytes=size)
            )
    return devices


def _tightest(
    mount: Path, path: str, read: Callable[[Path, str], CgroupMemory | None]
) -> CgroupMemory | None:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # The group lies outside of what this namespace may see.
        parts = []
    levels = ["/".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    groups = [group for level in levels if (group := read(mount / level, "/" + level)) is not None]
    limited = [group for group in groups if group.limit_bytes is not None]
    if limited:
        return min(limited, key=lambda group: group.limit_bytes or 0)
    return groups[0] if groups else None


def _read_v2(group: Path, path: str) -> CgroupMemory | None:
    used = _number(group / "memory.current")
    limit = _text(group / "memory.max").strip()
    if used is None and not limit:
        return None
    return CgroupMemory(
        version=2,
        path=path,
        limited=_parse(limit) is not None,
        limit_bytes=_parse(limit),
        used_bytes=used,
        peak_bytes=_number(group / "memory.peak"),
        shmem_bytes=_table(group / "memory.stat").get("shmem"),
        oom_kills=_table(group / "memory.events").get("oom_kill"),
    )


def _read_v1(group: Path, path: str) -> CgroupMemory | None:
    used = _number(group / "memory.usage_in_bytes")
    limit = _number(group / "memory.limit_in_bytes")
    if used is None and limit is None:
        return None
    if limit is not None and limit >= _V1_UNLIMITED:
        limit = None
    stat = _table(group / "memory.stat")
    return CgroupMemory(
        version=1,
        path=path,
        limited=limit is not None,
        limit_bytes=limit,
        used_bytes=used,
        peak_bytes=_number(group / "memory.max_usage_in_bytes"),
        shmem_bytes=stat.get("total_shmem", stat.get("shmem")),
        oom_kills=_table(group / "memory.oom_control").get("oom_kill"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _parse(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 and int(text) < _MAX else None


def _number(path: Path) -> int | None:
    return _parse(_text(path).strip())


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    table = {}
    for line in _text(path).splitlines():
        words = line.split()
        value = _parse(words[1]) if len(words) >= 2 else None
        if value is not None:
            table[words[0]] = value
    return table
