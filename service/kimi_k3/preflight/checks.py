# SPDX-License-Identifier: Apache-2.0
"""All checks, in their order: what must be right for the later ones to make sense comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from kimi_k3.checkpoint import Checkpoint
from kimi_k3.contract.facts import Use
from kimi_k3.errors import OperatorError
from kimi_k3.host import read_host_memory
from kimi_k3.plan.compose import compose, usual_gpu
from kimi_k3.plan.launch import Deployment, Launch
from kimi_k3.preflight.access import check_access
from kimi_k3.preflight.aiter_source import check_aiter
from kimi_k3.preflight.caches import check_caches
from kimi_k3.preflight.checkpoint import check_code, check_consent, check_plan
from kimi_k3.preflight.cores import check_cores
from kimi_k3.preflight.device import check_device
from kimi_k3.preflight.engine import check_directory, check_plugin_allowed, check_plugin_visible
from kimi_k3.preflight.finding import Finding, State, failed, of_error, overall, passed
from kimi_k3.preflight.gpus import check_gpus
from kimi_k3.preflight.kfd import read_gpus
from kimi_k3.preflight.limits import check_limits
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.memory import PROC, check_memory, check_shared_memory
from kimi_k3.preflight.network import check_port_free
from kimi_k3.preflight.subject import Subject
from kimi_k3.preflight.variables import check_environment
from kimi_k3.preflight.vllm_source import check_vllm
from kimi_k3.profiles.schema import Architecture

DRIVER, CORES, PLUGIN, PORT, QUARK = "gpu-driver", "cpu-cores", "vllm-plugin", "port", "amd-quark"
DIRECTORY = "current-directory"
MEETING = "nodes-port"
ANY_HOST = "0.0.0.0"
KFD = "/dev/kfd"
AITER = "VLLM_ROCM_USE_AITER"
TRUST = "--trust-remote-code"


def subject_of(
    deployment: Deployment,
    launch: Launch,
    checkpoint: Checkpoint | None,
    *,
    machine: Machine,
    wait_vram: float = 0.0,
) -> Subject:
    """What is checked of a start, with its plan if there is a checkpoint."""
    subject = Subject(deployment=deployment, launch=launch, checkpoint=checkpoint, wait_vram=wait_vram)
    if checkpoint is None:
        return subject
    gpu = usual_gpu(deployment.profile)
    host = read_host_memory(machine.path(PROC)).total_bytes if gpu is None else None
    return replace(subject, plan=compose(checkpoint.config, deployment, launch, gpu, host_bytes=host))


def of_image(machine: Machine, subject: Subject) -> Iterator[Finding]:
    """What can be known while an image is built."""
    yield from check_software(machine, subject)
    yield from check_caches(machine, subject.variables(machine.environment), on_gpus=subject.on_gpus)


def of_start(machine: Machine, subject: Subject, *, listen: bool = True) -> Iterator[Finding]:
    """Everything but the checkpoint's files; GPUs only for a profile that runs on them.

    Args:
        listen: whether the port must be free now.
    """
    driver = _asked(DRIVER, f"{KFD} is there", lambda: check_device(subject.profile, kfd=machine.path(KFD)))
    quick = [driver] if subject.on_gpus else []
    quick += check_software(machine, subject)
    if listen and not subject.deployment.headless:
        host, port = subject.deployment.host, subject.deployment.port
        quick.append(_asked(PORT, f"{port} on {host} is free", lambda: check_port_free(host, port)))
        if (place := subject.deployment.place) is not None:
            meet = partial(check_port_free, ANY_HOST, place.port, flag="--leader-port")
            quick.append(_asked(MEETING, f"{place.port} is free for the nodes", meet))
    quick += _of_machine(machine, subject)
    yield from quick
    if subject.on_gpus and driver.state is State.PASS:
        if overall(quick) is State.FAIL:
            # Nobody waits for GPUs that will not be used.
            subject = replace(subject, wait_vram=0.0)
        gpus = read_gpus(machine)
        yield check_access(machine, gpus)
        yield from check_gpus(machine, subject, gpus)


def _of_machine(machine: Machine, subject: Subject) -> Iterator[Finding]:
    yield _asked(DIRECTORY, "it hides no module", lambda: check_directory(Path()))
    if subject.checkpoint is not None:
        yield check_code(subject.checkpoint, allowed=TRUST in subject.flags)
    yield check_consent(subject.deployment)
    if subject.plan is not None:
        yield from check_plan(subject.plan)
    yield from check_environment(machine, subject)
    yield check_shared_memory(machine, subject)
    yield from check_memory(machine, subject)
    yield from check_caches(machine, subject.variables(machine.environment), on_gpus=subject.on_gpus)
    if subject.on_gpus:
        yield from check_limits(machine)
    else:
        yield _cores(machine, subject)


def check_software(machine: Machine, subject: Subject) -> Iterator[Finding]:
    """vLLM, the plugin, and AITER if the start uses it."""
    weights = subject.deployment.weights
    yield from check_vllm(machine, uses_of(subject))

    def plugin() -> None:
        check_plugin_visible()
        check_plugin_allowed(machine.environment)

    yield _asked(PLUGIN, "vLLM will find and load it", plugin)
    gpu = subject.profile.gpu
    if gpu is not None and gpu.architecture is Architecture.GFX942 and not weights.lossy:
        yield _emulation(machine)
    if gpu is not None and subject.variables(machine.environment).get(AITER) == "1":
        yield from check_aiter(machine, int4=weights.lossy and gpu.architecture is Architecture.GFX942)


def _emulation(machine: Machine) -> Finding:
    """gfx942 has no MXFP4 instructions, and vLLM emulates them only beside amd-quark."""
    if machine.package("quark") is None:
        return failed(
            QUARK,
            "amd-quark is not installed, and without it vLLM has no MXFP4 kernel for gfx942",
            "use the image, or pip install amd-quark",
        )
    return passed(QUARK, f"amd-quark {machine.version('amd-quark') or 'of unknown version'}")


def uses_of(subject: Subject) -> frozenset[Use] | None:
    """How the plugin builds on vLLM in this start; ``None`` on GPUs where it does nothing."""
    if not subject.profile.uses_plugin:
        return None
    uses = {Use.GFX942 if subject.on_gpus else Use.CPU}
    if subject.deployment.weights.lossy:
        uses.add(Use.INT4)
    return frozenset(uses)


def _cores(machine: Machine, subject: Subject) -> Finding:
    ranks = subject.ranks_here
    what = f"{len(machine.cores)} for {ranks} {'rank' if ranks == 1 else 'ranks'}"
    return _asked(CORES, what, lambda: check_cores(machine.cores, ranks))


def _asked(check: str, what: str, ask: Callable[[], None]) -> Finding:
    """The error that ``ask`` raises as a finding, else a pass."""
    try:
        ask()
    except OperatorError as error:
        return of_error(check, error)
    return passed(check, what)
