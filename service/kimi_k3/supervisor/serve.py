# SPDX-License-Identifier: Apache-2.0
"""From an operator's options to a supervised start."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kimi_k3 import __version__
from kimi_k3.checkpoint import Checkpoint, require_servable
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import CheckpointSummary, EarlierStart, Notice, PlannedMemory, SupervisorRecord
from kimi_k3.journal.writer import now
from kimi_k3.kernels.entry import CACHE
from kimi_k3.kernels.installed import DISTRIBUTIONS, VLLM_DISTRIBUTIONS, find_version
from kimi_k3.kernels.shipped import bring
from kimi_k3.kernels.wanted import built_directory, probe_directory
from kimi_k3.plan.chosen import chosen_profile
from kimi_k3.plan.compose import planned_rank
from kimi_k3.plan.fit import check_fit
from kimi_k3.plan.launch import (
    ENGINE_MODULE,
    HEADLESS_MODULE,
    Deployment,
    Launch,
    as_script,
    build_launch,
    child_environment,
    common_options,
    socket_dir,
)
from kimi_k3.plan.nodes import require_place
from kimi_k3.plan.options import Options, decide
from kimi_k3.plan.secret import read_api_key
from kimi_k3.plan.sharding import stages
from kimi_k3.plan.startable import require_startable
from kimi_k3.preflight.checkpoint import check_checkpoint
from kimi_k3.preflight.checks import of_start, subject_of
from kimi_k3.preflight.cores import check_cores
from kimi_k3.preflight.finding import Finding, State
from kimi_k3.preflight.gpus import WAIT_SECONDS, wait_seconds
from kimi_k3.preflight.hardware import hardware
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.probe import check_compile
from kimi_k3.preflight.state import check_state_dir
from kimi_k3.preflight.subject import Subject
from kimi_k3.profiles.schema import Device, Profile, Verified
from kimi_k3.supervisor.leader import Leader
from kimi_k3.supervisor.leftovers import clear_leftovers
from kimi_k3.supervisor.lock import hold_address, hold_lock
from kimi_k3.supervisor.outlet import Outlet
from kimi_k3.supervisor.redact import Secrets
from kimi_k3.supervisor.run import supervise
from kimi_k3.supervisor.start import Start
from kimi_k3.words.addresses import SIDECAR_PORT
from kimi_k3.words.environment import EngineEnvironment, default_state_dir
from kimi_k3.words.python import python_module
from kimi_k3.words.sidecar import TOKEN, TOKEN_FILE, read_token, sidecar_url

ENGINE_COMMAND = python_module(ENGINE_MODULE)
HEADLESS_COMMAND = python_module(HEADLESS_MODULE)
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a server that listens everywhere is reached from this machine."""


def serve(
    options: Options,
    *,
    profile_name: str,
    state_dir: Path | None,
    api_key_file: Path | None,
    dry_run: bool,
    wait_vram: float | None = None,
    probe_compile: bool = True,
    leader_sidecar: str | None = None,
    leader_authorities: Path | None = None,
    engine_command: Sequence[str] | None = None,
) -> int:
    """Check, start and supervise; with ``dry_run`` only print what would be started.

    Everything that needs no lock is checked first, so that a mistake does not disturb a start that runs.

    Returns:
        The exit code of a start that was asked to end.

    Raises:
        OperatorError: the start is not possible, or it failed.
    """
    profile = chosen_profile(profile_name, options)
    require_startable(profile)
    require_place(profile, options.node_rank, options.leader_address)
    wait = wait_seconds(wait_vram, profile, default=WAIT_SECONDS)
    api_key = read_api_key(api_key_file, os.environ)
    start_id = f"{now():%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    deployment = decide(
        options,
        profile,
        # Absolute: the engine's processes may run elsewhere, and the name is part of what marks them.
        state_dir=(state_dir or default_state_dir()).resolve(),
        socket_dir=socket_dir(start_id, _temporary_directory()),
        start_id=start_id,
        consent_in_environment=EngineEnvironment.read().accept_lossy,
        guarded=api_key is not None,
    )
    cores = os.sched_getaffinity(0)
    if profile.device is Device.CPU:
        check_cores(cores, profile.ranks_per_node)
    checkpoint = require_servable(options.checkpoint)
    check_fit(deployment, checkpoint.config.text_config)
    command = engine_command or (HEADLESS_COMMAND if deployment.headless else ENGINE_COMMAND)
    launch = build_launch(deployment, cores=cores, engine_command=command)
    leader = None if dry_run else first_node(deployment, leader_sidecar, leader_authorities)
    if dry_run:
        print(as_script(launch))
        return 0
    check_state_dir(deployment.state_dir)
    report = Outlet(sys.stderr, prefix="kimi-k3: ", secrets=Secrets.of(api_key, os.environ))
    with contextlib.ExitStack() as held:
        held.enter_context(hold_lock(deployment.state_dir))
        if not deployment.headless:
            held.enter_context(hold_address(deployment.host, deployment.port))
        previous = clear_leftovers(deployment.state_dir, report=report)
        machine = Machine()
        subject = subject_of(deployment, launch, checkpoint, machine=machine, wait_vram=wait)
        start = Start(
            record=first_record(deployment, launch, checkpoint, previous),
            argv=launch.argv,
            state_dir=deployment.state_dir,
            socket_dir=deployment.socket_dir,
            environment=child_environment(launch, _with_kernels(deployment, report), api_key=api_key),
            api_key=api_key,
            start_timeout=deployment.start_timeout,
            drain_timeout=deployment.drain_timeout,
            readiness_delay=deployment.readiness_delay,
            hang_timeout=deployment.hang_timeout,
            engines=deployment.profile.data_parallel_size,
            leader=leader,
            checks=(
                partial(
                    check_machine, machine, subject, report, probe=probe_compile and _on_int4(deployment)
                ),
            ),
        )
        return supervise(start, report=report, forward=Outlet(sys.stdout))


def first_node(deployment: Deployment, sidecar: str | None, authorities: Path | None) -> Leader | None:
    """The first node, for any other one.

    Nodes of one deployment know each other by the sidecar's token, which all of them have.

    Args:
        deployment: that is started.
        sidecar: URL of the first node's; ``None`` for the usual port at its address.
        authorities: by which its certificate is checked.

    Raises:
        OperatorError: there are several nodes and no token, or the URL is none.
    """
    if (place := deployment.place) is None:
        return None
    token = read_token(None, os.environ)
    if token is None:
        raise OperatorError(
            f"a deployment over {place.nodes} nodes needs a token, by which they know each other",
            remedy=f"give all nodes and their sidecars the same {TOKEN} or {TOKEN_FILE}",
            exit_code=ExitCode.USAGE,
        )
    if not place.headless:
        return None
    host = f"[{place.leader}]" if ":" in place.leader else place.leader
    url = sidecar_url(sidecar or f"{host}:{SIDECAR_PORT}")
    return Leader(url, token=token, authorities=authorities)


def _temporary_directory() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise OperatorError(
            f"vLLM's sockets: {error.strerror}",
            remedy="mount a tmpfs at /tmp (docker: --tmpfs /tmp), or name a directory with TMPDIR",
        ) from None


def _on_int4(deployment: Deployment) -> bool:
    """Whether the experts will be computed by AITER's int4 kernels."""
    profile = deployment.profile
    return profile.gpu is not None and profile.uses_plugin and deployment.weights.lossy


def _with_kernels(deployment: Deployment, report: Callable[[str], None]) -> dict[str, str]:
    """The inherited environment, with the kernels of ``kernels build`` unless the operator names others."""
    inherited = dict(os.environ)
    if _on_int4(deployment) and CACHE not in inherited:
        try:
            bring(inherited)
        except OSError as error:
            report(
                f"kernels: the image's cannot be copied ({error}): they are compiled when they are first used"
            )
        directory = built_directory(inherited)
        if directory is not None:
            report(f"kernels: those in {directory} are used ({CACHE})")
            inherited[CACHE] = str(directory)
    return inherited


def first_record(
    deployment: Deployment, launch: Launch, checkpoint: Checkpoint, previous: EarlierStart | None
) -> SupervisorRecord:
    """The record with which a start begins."""
    moment = now()
    return SupervisorRecord(
        start_id=deployment.start_id,
        pid=os.getpid(),
        started_at=moment,
        updated_at=moment,
        profile=deployment.profile.name,
        checkpoint=summary(checkpoint),
        served_model_name=deployment.served_model_name,
        weights=deployment.weights,
        requantisation=deployment.requantisation,
        consent=deployment.consent,
        world_size=deployment.profile.ranks,
        nodes=deployment.profile.nodes,
        node=0 if deployment.place is None else deployment.place.node,
        stages=_stages(deployment.profile, checkpoint),
        stage_ranks=deployment.tensor_parallel_size,
        versions=_versions(),
        options=common_options(launch, deployment),
        hardware=hardware(Machine(), on_gpus=deployment.profile.gpu is not None),
        ranks_report=deployment.profile.uses_plugin,
        engine_url=(
            None
            if deployment.headless
            else engine_url(deployment.host, deployment.port, secure=deployment.tls is not None)
        ),
        start_timeout_seconds=deployment.start_timeout,
        planned=planned(deployment, launch, checkpoint),
        notices=_of_profile(deployment.profile),
        previous=previous,
    )


def _versions() -> dict[str, str]:
    """Versions of what computes; of what is not installed nothing."""
    found = {
        "kimi-k3-gfx942": __version__,
        "vllm": find_version(*VLLM_DISTRIBUTIONS),
        "torch": find_version("torch"),
        "aiter": find_version(*DISTRIBUTIONS),
    }
    return {name: version for name, version in found.items() if version is not None}


def _stages(profile: Profile, checkpoint: Checkpoint) -> tuple[tuple[int, ...], ...]:
    """The MoE layers of each pipeline stage; none where every rank has all of them."""
    if profile.pipeline_parallel_size == 1:
        return ()
    cut = stages(checkpoint.layers, profile.pipeline_parallel_size)
    return tuple(tuple(layer for layer in checkpoint.moe_layers if layer in stage) for stage in cut)


def planned(deployment: Deployment, launch: Launch, checkpoint: Checkpoint) -> PlannedMemory:
    """What the plan gives one rank."""
    rank = planned_rank(checkpoint.config, deployment, launch)
    return PlannedMemory(
        weights_bytes=rank.resident,
        transient_bytes=max(0, rank.peak - rank.resident),
        step_bytes=rank.step,
        kv_cache_bytes=rank.cache,
        limit_bytes=rank.limit,
    )


def _of_profile(profile: Profile) -> tuple[Notice, ...]:
    """That nobody has tried it, if so."""
    if profile.verified is not Verified.UNVERIFIED:
        return ()
    return (
        Notice(
            check="profile-unverified",
            what=f"profile {profile.name}: nobody has run it on its hardware and reported it",
            remedy="hold its memory and speed against the plan, and report what you see",
        ),
    )


def summary(checkpoint: Checkpoint) -> CheckpointSummary:
    """What the journal keeps of a checkpoint."""
    assert checkpoint.total_bytes is not None, "require_servable lets only whole checkpoints pass"
    return CheckpointSummary(
        name=checkpoint.path.name,
        total_bytes=checkpoint.total_bytes,
        shards=len(checkpoint.shards),
        decoder_layers=checkpoint.layers,
        moe_layers=checkpoint.moe_layers,
        experts=checkpoint.experts,
    )


def engine_url(host: str, port: int, *, secure: bool) -> str:
    """How this machine reaches a server that listens on ``host:port``; ``secure`` is with TLS."""
    reachable = ANY_ADDRESS.get(host, host)
    scheme = "https" if secure else "http"
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


def check_machine(
    machine: Machine,
    subject: Subject,
    report: Callable[[str], None],
    pause: Callable[[float], bool],
    *,
    probe: bool = False,
) -> tuple[Notice, ...]:
    """The preflight, and the probe if the start wants it: warnings are told, the first failure is raised.

    Of a servable checkpoint, only what is odd about it is told. For a start that fails nothing is compiled.

    Args:
        machine: that is checked.
        subject: the start.
        report: gets a line for each warning, and one before a wait.
        pause: sleeps some seconds and says whether to go on waiting.
        probe: whether AITER's kernels shall be compiled apart from vLLM first.

    Returns:
        The warnings.

    Raises:
        OperatorError: a check failed; says how many others did.
    """
    told = False

    def patiently(seconds: float) -> bool:
        nonlocal told
        if not told:
            report(f"preflight: GPU memory is in use, waiting up to {subject.wait_vram:.0f} s for it")
            told = True
        return pause(seconds)

    about = () if subject.checkpoint is None else check_checkpoint(subject.checkpoint)
    notices = _judge((*about, *of_start(replace(machine, pause=patiently), subject)), report)
    if probe:
        notices += _judge(_probe(replace(machine, pause=pause), report), report)
    return notices


def _judge(findings: Sequence[Finding], report: Callable[[str], None]) -> tuple[Notice, ...]:
    """Tell warnings and return them; raise the first failure."""
    odd = [finding for finding in findings if finding.state in (State.WARN, State.UNKNOWN)]
    for finding in odd:
        report(f"preflight: {finding}")
    failures = [finding for finding in findings if finding.state is State.FAIL]
    if failures:
        raise failures[0].refusal(len(failures) - 1)
    return tuple(
        Notice(check=finding.check, what=finding.what, remedy=finding.remedy or "look at it")
        for finding in odd
    )


def _probe(machine: Machine, report: Callable[[str], None]) -> tuple[Finding, ...]:
    """Let AITER compile its kernels apart from vLLM, whose processes an abort of LLVM would end."""
    try:
        cache = probe_directory(machine.environment, machine.search)
        cache.mkdir(parents=True, exist_ok=True)
    except (OperatorError, OSError) as error:
        cache = None
        report(f"preflight: what the probe compiles cannot be kept: {error}")
    report("preflight: AITER compiles its int4 kernels apart from vLLM, unless it did before; minutes")
    return tuple(check_compile(machine, cache=cache))
