# SPDX-License-Identifier: Apache-2.0
"""A made-up machine on disk: a node of eight MI325X, with AITER and FlyDSL as far as they are looked at."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kimi_k3.plan.launch import build_launch
from kimi_k3.plan.options import Options, decide
from kimi_k3.preflight.machine import Machine, Space
from kimi_k3.preflight.subject import Subject
from kimi_k3.profiles.load import load_profile

GIB = 2**30
VRAM = 256 * GIB - 16 * 2**20
RENDER_GID = 109
USER = 1000

CPU_NODE = "cpu_cores_count 96\nsimd_count 0\nmem_banks_count 1\ngfx_target_version 0\nvendor_id 0\n"
GPU_NODE = """cpu_cores_count 0
simd_count 1216
mem_banks_count 1
lds_size_in_kb 64
wave_front_size 64
simd_per_cu 4
gfx_target_version {version}
vendor_id 4098
device_id {device}
location_id {location}
domain 0
drm_render_minor {minor}
unique_id 9895604649984
num_xcc 8
"""
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max stack size            67108864             unlimited            bytes
Max open files            1024                 1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
MOUNTINFO = """22 1 0:20 / / rw,relatime - overlay overlay rw,lowerdir=/l
23 22 0:21 / /proc rw,nosuid - proc proc rw
24 22 0:22 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
25 24 0:23 / /dev/shm rw,nosuid - tmpfs shm rw,size=67108864k
26 22 259:1 / /scratch rw,relatime shared:1 - xfs /dev/nvme0n1 rw
27 22 0:50 / /models ro,relatime - nfs4 storage:/models rw,vers=4.2
"""
AITER_KERNELS = "aiter/ops/flydsl/kernels"


@dataclass
class Node:
    """A machine below ``root``; change its files, then ask for :attr:`machine`."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"HOME": "/scratch/home"})
    groups: frozenset[int] = frozenset({USER, RENDER_GID})
    shm: Space = field(default_factory=lambda: Space(128 * GIB, 127 * GIB))
    clock: Callable[[], float] = lambda: 0.0
    pause: Callable[[float], bool] = lambda seconds: True

    def write(self, name: str, text: str) -> Path:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def remove(self, name: str) -> None:
        path = self.root / name.lstrip("/")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def device(self, gpu: int, name: str) -> str:
        """A file of the graphics driver, of the GPU with a number from 0."""
        return f"/sys/class/drm/renderD{128 + gpu * 8}/device/{name}"

    @property
    def search(self) -> Path:
        return self.root / "site"

    @property
    def machine(self) -> Machine:
        return Machine(
            root=self.root,
            environment=self.environment,
            uid=USER,
            groups=self.groups,
            cores=frozenset(range(96)),
            search=(str(self.search),),
            space=lambda path: self.shm,
            opens=self._open,
            pause=self.pause,
            clock=self.clock,
        )

    def _open(self, path: Path) -> None:
        """By the file's mode, as the kernel would for ``USER``: tests may run as root, who opens anything."""
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        bits = path.stat().st_mode >> (3 if path.stat().st_gid in self.groups else 0)
        if bits & 6 != 6:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def mi325x_node(root: Path, *, gpus: int = 8) -> Node:
    """A healthy node."""
    node = Node(root)
    node.write("/sys/class/kfd/kfd/topology/nodes/0/properties", CPU_NODE)
    for gpu in range(gpus):
        minor = 128 + gpu * 8
        node.write(
            f"/sys/class/kfd/kfd/topology/nodes/{gpu + 1}/properties",
            GPU_NODE.format(version=90402, device=0x74A5, location=4096 * gpu, minor=minor),
        )
        node.write(node.device(gpu, "mem_info_vram_total"), f"{VRAM}\n")
        node.write(node.device(gpu, "mem_info_vram_used"), f"{300 * 2**20}\n")
        node.write(node.device(gpu, "current_compute_partition"), "SPX\n")
        node.write(node.device(gpu, "current_memory_partition"), "NPS1\n")
        node.write(f"/dev/dri/renderD{minor}", "")
    node.write("/dev/kfd", "")
    for device in [root / "dev" / "kfd", *(root / "dev" / "dri").iterdir()]:
        device.chmod(0o666)
    (root / "dev" / "shm").mkdir()
    (root / "sys/class/kfd/kfd/proc").mkdir()
    node.write("/proc/meminfo", f"MemTotal: {2 * 2**30} kB\nMemAvailable: {2**31 - 2**24} kB\nShmem: 0 kB\n")
    node.write("/proc/self/cgroup", "0::/kubepods/pod1/main\n")
    node.write("/proc/self/limits", LIMITS)
    node.write("/proc/self/mountinfo", MOUNTINFO)
    for group in ("kubepods", "kubepods/pod1", "kubepods/pod1/main"):
        node.write(f"/sys/fs/cgroup/{group}/memory.max", "max\n")
        node.write(f"/sys/fs/cgroup/{group}/memory.current", f"{3 * GIB}\n")
        node.write(f"/sys/fs/cgroup/{group}/memory.stat", f"anon {GIB}\nfile {2 * GIB}\nshmem {GIB // 2}\n")
    (root / "scratch" / "home").mkdir(parents=True)
    (root / "tmp").mkdir()
    install_aiter(node)
    return node


def install_aiter(node: Node, *, version: str = "0.1.24", parameters: str = "a_bf16, act='silu'") -> None:
    """AITER and FlyDSL, as far as they are looked at."""
    for old in node.search.glob("amd_aiter-*"):
        shutil.rmtree(old)
    node.write(
        f"/site/amd_aiter-{version}.dist-info/METADATA",
        f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {version}\n",
    )
    node.write("/site/aiter/__init__.py", "raise RuntimeError('nobody may import this')\n")
    node.write(
        f"/site/{AITER_KERNELS}/moe_2stage_a16wmix/__init__.py",
        f"import torch\n\ndef flydsl_a16w4_gemm1(*, {parameters}):\n    pass\n",
    )
    node.write("/site/flydsl/__init__.py", "")
    node.write(
        "/site/flydsl-0.2.4.dist-info/METADATA", "Metadata-Version: 2.1\nName: flydsl\nVersion: 0.2.4\n"
    )


def subject(
    profile: str = "ep8",
    *,
    wait_vram: float = 0.0,
    accept_lossy: bool = True,
    weights: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Subject:
    """A start by ``profile`` without a checkpoint."""
    deployment = decide(
        Options(
            checkpoint=Path("/models/k3"),
            host="127.0.0.1",
            port=8000,
            served_model_name="kimi-k3",
            accept_lossy=accept_lossy,
            weights=weights,
        ),
        load_profile(profile),
        state_dir=Path("/state"),
        socket_dir=Path("/tmp/sockets"),
        start_id="test",
        consent_in_environment=False,
    )
    launch = build_launch(deployment, cores=range(16), engine_command=("vllm",))
    launch = replace(launch, environment={**launch.environment, **(variables or {})})
    return Subject(deployment=deployment, launch=launch, wait_vram=wait_vram)
