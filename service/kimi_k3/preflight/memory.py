# SPDX-License-Identifier: Apache-2.0
"""Memory of the machine and of this process's control group; shared memory, which counts towards both."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k3.host import CgroupMemory, CgroupUse, read_cgroup_memory, read_cgroup_use, read_host_memory
from kimi_k3.plan.compose import CPU_CACHE_VARIABLE
from kimi_k3.plan.memory import gib
from kimi_k3.preflight.finding import Finding, failed, passed, unknown, warned
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.subject import Subject
from kimi_k3.words.gpus import GIB

SHM, LIMIT, READ_AHEAD = "shared-memory", "memory-limit", "memory-read-ahead"
SHM_DIR = "/dev/shm"
CGROUP = "/sys/fs/cgroup"
PROC = "/proc"
MIB = 2**20
MACHINE = "the machine"

SHM_FATAL_CPU_BYTES = 160 * MIB
"""With 64 MiB, a container's default, vLLM on a CPU dies of SIGBUS; with 160 MiB one rank serves."""

SHM_FATAL_GPU_BYTES = 1 * GIB
"""With 64 MiB RCCL and vLLM's queues die (vllm-project/vllm#1710). The queues of eight ranks are 10 chunks of
24 MiB each (vllm/distributed/device_communicators/shm_broadcast.py), RCCL comes on top."""

SHM_SEEN_GPU_BYTES = 64 * GIB
"""The least that a published deployment of Kimi-K3 on eight GPUs had; ROCm/MAD has 128."""

RANK_LEAST_BYTES = 1 * GIB
"""Of a rank's process: what importing torch and vLLM alone takes."""

RANK_ESTIMATED_BYTES = 8 * GIB
"""Of a rank's process on GPUs: an estimate, for nobody published a measurement. The shards are mapped, and
count as page cache, which the kernel takes back."""

DOCKER_SHM = (
    "docker: --ipc=host, or --shm-size; compose: shm_size; Kubernetes: an emptyDir with medium: Memory"
)


def check_shared_memory(machine: Machine, subject: Subject) -> Finding:
    """``/dev/shm`` is large enough, and not full."""
    fatal = SHM_FATAL_GPU_BYTES if subject.on_gpus else SHM_FATAL_CPU_BYTES
    wanted = SHM_SEEN_GPU_BYTES if subject.on_gpus else fatal
    try:
        space = machine.space(machine.path(SHM_DIR))
    except OSError as error:
        return failed(SHM, f"{SHM_DIR}: {error.strerror or error}", f"mount a tmpfs there; {DOCKER_SHM}")
    size = f"{SHM_DIR} has {sized(space.total)}, {sized(space.free)} free"
    if space.total < fatal:
        return failed(
            SHM,
            f"{size}: with less than {sized(fatal)} the ranks die of a bus error",
            f"make it {sized(wanted)} large; {DOCKER_SHM} (at {SHM_DIR})",
        )
    if space.free < fatal:
        return failed(
            SHM, f"{size}, {sized(fatal)} are needed", f"remove what a killed start left in {SHM_DIR}"
        )
    if space.total < wanted:
        return warned(
            SHM,
            f"{size}: the smallest in a published start on eight GPUs was {sized(wanted)}",
            f"{DOCKER_SHM} (at {SHM_DIR})",
        )
    return passed(SHM, size)


def check_memory(machine: Machine, subject: Subject) -> Iterator[Finding]:
    """The control group's limit, and the machine's memory, against what a start takes."""
    group = read_cgroup_memory(machine.path(PROC), machine.path(CGROUP))
    host = read_host_memory(machine.path(PROC))
    yield _check_limit(machine, subject, group, host.total_bytes)
    if (ahead := _check_read_ahead(subject, group, host.total_bytes)) is not None:
        yield ahead


def _check_limit(
    machine: Machine, subject: Subject, group: CgroupMemory | None, total: int | None
) -> Finding:
    """The tightest limit, of the group or of one that it is in, else the machine's memory."""
    use = None if group is None else read_cgroup_use(group, machine.path(CGROUP))
    limit, whose = total, MACHINE
    if group is not None and group.limit_bytes is not None and (total is None or group.limit_bytes < total):
        limit, whose = group.limit_bytes, f"control group {group.path} (version {group.version})"
    if limit is None:
        return unknown(
            LIMIT, "neither /proc/meminfo nor a control group tells", "mount /proc and /sys/fs/cgroup"
        )
    least, likely, parts = _need(subject)
    taken = 0
    if use is not None and whose != MACHINE:
        # Page cache is given back; these two are not.
        taken = (use.anon or 0) + (use.shmem or 0)
    what = f"{whose} has {sized(limit)}{_used(use) if whose != MACHINE else ''}, a start takes {parts}"
    if limit - taken < least:
        return failed(LIMIT, what, f"allow at least {sized(likely + taken)} (shared memory counts, too)")
    if limit - taken < likely:
        return warned(LIMIT, what, f"allow {sized(likely + taken)} (shared memory counts, too)")
    return passed(LIMIT, what)


def _need(subject: Subject) -> tuple[int, int, str]:
    """Bytes without which a start surely fails, bytes that it may take, and how they are made up."""
    ranks = subject.ranks_here
    if subject.on_gpus:
        least = ranks * RANK_LEAST_BYTES + SHM_FATAL_GPU_BYTES
        likely = ranks * RANK_ESTIMATED_BYTES + SHM_FATAL_GPU_BYTES
        return (
            least,
            likely,
            f"about {sized(RANK_ESTIMATED_BYTES)} (estimated) in each of {ranks} ranks and "
            f"{sized(SHM_FATAL_GPU_BYTES)} of shared memory",
        )
    cache = int(float(subject.launch.environment.get(CPU_CACHE_VARIABLE) or 0) * GIB)
    weights = 0 if subject.plan is None else subject.plan.per_rank.conversion_peak_bytes
    each = weights + cache + RANK_LEAST_BYTES
    return (
        ranks * (weights + cache) + SHM_FATAL_CPU_BYTES,
        ranks * each + SHM_FATAL_CPU_BYTES,
        f"about {sized(each)} in each of {ranks} {'rank' if ranks == 1 else 'ranks'} and "
        f"{sized(SHM_FATAL_CPU_BYTES)} of shared memory",
    )


def _check_read_ahead(subject: Subject, group: CgroupMemory | None, total: int | None) -> Finding | None:
    """Memory for the whole checkpoint, if the profile reads it into the page cache first."""
    flag = "--safetensors-load-strategy"
    checkpoint = subject.checkpoint
    if subject.flags.get(flag) != "prefetch" or checkpoint is None or checkpoint.total_bytes is None:
        return None
    limit = group.limit_bytes if group is not None else None
    known = [size for size in (limit, total) if size is not None]
    if not known:
        return unknown(READ_AHEAD, "/proc/meminfo does not tell the size of memory", "mount /proc")
    what = f"{sized(min(known))} of memory for a checkpoint of {sized(checkpoint.total_bytes)}"
    if min(known) >= checkpoint.total_bytes:
        return passed(READ_AHEAD, what)
    return warned(
        READ_AHEAD,
        f"{what}: {flag} prefetch reads all of it, and the first shards are gone when the ranks need them",
        "allow the container more memory, or take a profile that reads lazily, e.g. ep8",
    )


def _used(use: CgroupUse | None) -> str:
    if use is None:
        return ""
    parts = (("anonymous", use.anon), ("page cache", use.file), ("shared", use.shmem))
    told = [f"{name} {sized(size)}" for name, size in parts if size is not None]
    return f" ({', '.join(told)} in use)" if told else ""


def sized(size: int) -> str:
    """A size for a sentence: MiB below one GiB."""
    return gib(size) if size >= GIB else f"{size / MIB:.0f} MiB"
