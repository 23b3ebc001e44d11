# SPDX-License-Identifier: Apache-2.0
"""The GPUs: the right ones, enough of them, whole, and free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.memory import gib
from kimi_k3.plan.options import MAX_SECONDS
from kimi_k3.preflight import kfd
from kimi_k3.preflight.finding import Finding, failed, passed, unknown
from kimi_k3.preflight.kfd import GpuNode, Gpus
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.subject import Subject
from kimi_k3.profiles import schema
from kimi_k3.words.gpus import GIB, GPUS

ARCHITECTURE, COUNT, PARTITION, MEMORY, FREE = (
    "gpu-architecture",
    "gpu-count",
    "gpu-partition",
    "gpu-memory",
    "gpu-memory-free",
)
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
WHOLE, ONE_DOMAIN = "SPX", "NPS1"
POLL_SECONDS = 1.0
WAIT_SECONDS = 60.0
"""What a start waits unless told otherwise: the memory of a predecessor that was killed is free some seconds
after its end, and an orderly teardown on ROCm takes 15 s (vllm/v1/engine/utils.py). An estimate."""

MAX_NAMED_PROCESSES = 8
PASS_THE_DEVICES = "pass /dev/kfd and the /dev/dri/renderD* of every GPU into the container"


def wait_seconds(given: float | None, profile: schema.Profile, *, default: float) -> float:
    """How long to wait for GPU memory.

    Args:
        given: by ``--wait-vram``.
        profile: the start's.
        default: without that flag.

    Raises:
        OperatorError: it is no such number, or there are no GPUs to wait for.
    """
    if given is None:
        return default
    if not 0 <= given <= MAX_SECONDS:
        raise OperatorError(
            f"--wait-vram {given}: is not a possible number of seconds",
            remedy=f"give 0 or more, at most {MAX_SECONDS}",
            exit_code=ExitCode.USAGE,
        )
    if profile.gpu is None:
        raise OperatorError(
            f"--wait-vram has no effect with profile {profile.name}, which uses no GPU",
            remedy="leave it out",
            exit_code=ExitCode.USAGE,
        )
    return given


def check_gpus(machine: Machine, subject: Subject, gpus: Gpus) -> Iterator[Finding]:
    """Everything about the GPUs, free memory last since it may wait."""
    wanted = subject.profile.gpu
    if wanted is None:
        return
    if not gpus.usable:
        why = (
            f"{gpus.hidden} GPUs are kept from this process" if gpus.hidden else "the kernel knows no AMD GPU"
        )
        remedy = PASS_THE_DEVICES if gpus.hidden else "load the amdgpu driver, or start on a node with GPUs"
        yield failed(COUNT, f"no GPU can be used: {why} ({kfd.NODES})", remedy)
        return
    yield check_architecture(gpus.usable, wanted)
    yield check_count(machine, gpus, subject)
    yield check_partition(gpus.usable)
    yield check_size(gpus.usable, wanted)
    yield check_free(machine, subject, gpus.usable)


def described(gpus: Sequence[GpuNode]) -> str:
    """GPUs in words, equal ones together."""
    found = Counter(f"{gpu.architecture} ({_model(gpu)})" for gpu in gpus)
    return ", ".join(f"{count} x {name}" for name, count in sorted(found.items()))


def check_architecture(gpus: Sequence[GpuNode], wanted: schema.Gpu) -> Finding:
    """All of the architecture that the profile is for."""
    what = described(gpus)
    if all(gpu.architecture == wanted.architecture for gpu in gpus):
        return passed(ARCHITECTURE, what)
    return failed(
        ARCHITECTURE,
        f"{what}: the profile is for {wanted.architecture} only",
        f"start on a node of {wanted.architecture}, or take a profile for these GPUs (docs/profiles.md)",
    )


def check_count(machine: Machine, gpus: Gpus, subject: Subject) -> Finding:
    """One GPU for each rank of this node, after what the environment hides."""
    needed, here = subject.ranks_here, len(gpus.usable)
    hidden = f", {gpus.hidden} more are kept from this process" if gpus.hidden else ""
    for name in VISIBLE:
        if (value := machine.environment.get(name)) is not None:
            shown = len([entry for entry in value.split(",") if entry.strip()])
            if shown < needed:
                return failed(
                    COUNT,
                    f"environment variable {name}={value!r} leaves {shown} GPUs, the start needs {needed}",
                    "unset it, or name that many",
                )
    if here < needed:
        return failed(
            COUNT,
            f"{here} GPUs can be used{hidden}, the start needs {needed}, one for each rank of this node",
            f"{PASS_THE_DEVICES}, or take a profile for fewer GPUs",
        )
    spare = f", {here - needed} of them will idle" if here > needed else ""
    return passed(COUNT, f"{here} GPUs for {needed} ranks{spare}{hidden}")


def check_partition(gpus: Sequence[GpuNode]) -> Finding:
    """Whole GPUs with one memory domain: partitions look like GPUs, and each has an eighth of the memory."""
    modes = Counter((gpu.compute_partition, gpu.memory_partition) for gpu in gpus)
    what = ", ".join(
        f"{count} x {compute or 'unknown'}/{memory or 'unknown'}"
        for (compute, memory), count in sorted(modes.items(), key=str)
    )
    if any(compute not in (None, WHOLE) for compute, _ in modes):
        return failed(
            PARTITION,
            f"compute partitions {what}: these are parts of GPUs, and {WHOLE} is a whole one",
            f"as root on the host, while nothing runs: amd-smi set --gpu all --compute-partition {WHOLE}",
        )
    if any(memory not in (None, ONE_DOMAIN) for _, memory in modes):
        return failed(
            PARTITION,
            f"memory partitions {what}: each sees only a part of its memory as near, and {ONE_DOMAIN} is all",
            f"as root on the host, while nothing runs: amd-smi set --gpu all --memory-partition {ONE_DOMAIN}",
        )
    if any(None in mode for mode in modes):
        return unknown(
            PARTITION,
            f"partitions {what}: the driver does not tell (a virtual function does not)",
            f"make sure on the host that amd-smi partition shows {WHOLE} and {ONE_DOMAIN}",
        )
    return passed(PARTITION, what)


def check_size(gpus: Sequence[GpuNode], wanted: schema.Gpu) -> Finding:
    """As much memory in each as the profile needs."""
    told = [gpu.vram_total for gpu in gpus if gpu.vram_total is not None]
    if not told:
        return unknown(
            MEMORY,
            "the driver does not tell how much memory the GPUs have (mem_info_vram_total)",
            f"make sure that each has {wanted.memory_gib} GiB, e.g. with amd-smi static --vram",
        )
    least = min(told)
    # The driver keeps some MiB of it to itself.
    if least < (wanted.memory_gib - 1) * GIB:
        return failed(
            MEMORY,
            f"a GPU has {gib(least)}, the profile is for {wanted.memory_gib} GiB: {wanted.why}",
            "take a profile for these GPUs; kimi-k3 plan --gpu names one that fits",
        )
    return passed(MEMORY, f"{gib(least)} in the smallest of {len(told)}")


def check_free(machine: Machine, subject: Subject, gpus: Sequence[GpuNode]) -> Finding:
    """As little in use as vLLM demands; waits for a predecessor whose memory the driver has yet to free.

    vLLM compares free memory with ``--gpu-memory-utilization`` of all, and ends the start if it is less.
    """
    share = float(subject.flags.get("--gpu-memory-utilization") or 1)
    begin = machine.clock()
    while busy := list(_busy(machine, gpus, share)):
        waited = machine.clock() - begin
        if waited >= subject.wait_vram or not machine.pause(min(POLL_SECONDS, subject.wait_vram - waited)):
            break
    waited = machine.clock() - begin
    after = f" after {waited:.0f} s of waiting" if subject.wait_vram and waited >= POLL_SECONDS else ""
    if busy:
        gpu, used, allowed = max(busy, key=lambda one: one[1])
        return failed(
            FREE,
            f"{len(busy)} of {len(gpus)} GPUs are in use{after}: {gib(used)} on {gpu.name}, and "
            f"--gpu-memory-utilization {share:g} allows others {gib(allowed)}{_users(machine)}",
            "end what uses them (amd-smi process), or wait longer for a process that is ending: --wait-vram",
        )
    known = [size for gpu in gpus if (size := kfd.used_bytes(machine, gpu)) is not None]
    if len(known) < len(gpus):
        return unknown(
            FREE,
            f"the driver does not tell what is in use on {len(gpus) - len(known)} of {len(gpus)} GPUs",
            "make sure that nothing uses them, e.g. with amd-smi process",
        )
    return passed(FREE, f"at most {gib(max(known))} in use on any{after}")


def _busy(machine: Machine, gpus: Iterable[GpuNode], share: float) -> Iterator[tuple[GpuNode, int, int]]:
    for gpu in gpus:
        used = kfd.used_bytes(machine, gpu)
        if used is not None and gpu.vram_total is not None:
            allowed = gpu.vram_total - int(gpu.vram_total * share)
            if used > allowed:
                yield gpu, used, allowed


def _users(machine: Machine) -> str:
    if not (found := kfd.processes(machine)):
        return ""
    more = f" and {len(found) - MAX_NAMED_PROCESSES} more" if len(found) > MAX_NAMED_PROCESSES else ""
    return f"; in use by pid {', '.join(map(str, found[:MAX_NAMED_PROCESSES]))}{more} of the host"


def _model(gpu: GpuNode) -> str:
    for known in GPUS.values():
        if gpu.device_id in known.device_ids:
            return known.title
    return f"device id {gpu.device_id or 'unknown'}"
