# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 preflight``: every check of a start, without the start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kimi_k3 import __version__
from kimi_k3.checkpoint import Checkpoint, inspect_checkpoint
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.chosen import chosen_profile
from kimi_k3.plan.fit import check_fit
from kimi_k3.plan.launch import ENGINE_MODULE, Deployment, build_launch, socket_dir
from kimi_k3.plan.options import Options, decide
from kimi_k3.preflight.checkpoint import PLAN, check_checkpoint, check_profile
from kimi_k3.preflight.checks import of_image, of_start, subject_of
from kimi_k3.preflight.finding import Finding, Report, of_error, overall
from kimi_k3.preflight.gpus import wait_seconds
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.probe import check_compile
from kimi_k3.preflight.state import CHECK as STATE
from kimi_k3.preflight.state import look_at_state_dir
from kimi_k3.preflight.subject import Subject
from kimi_k3.preflight.view import print_report
from kimi_k3.profiles.schema import Architecture, Profile
from kimi_k3.words.environment import EngineEnvironment, default_state_dir
from kimi_k3.words.python import python_module

NEXT_START = "next"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line of one preflight.

    Attributes:
        options: as of ``kimi-k3 serve``; its checkpoint counts only with ``with_checkpoint``.
        with_checkpoint: whether a checkpoint was named.
        profile: its name.
        state_dir: of the start; ``None`` for the default.
        listen: whether the port must be free now.
        image: whether only what is known in an image is checked.
        probe_compile: whether kernels are compiled.
        wait_vram: seconds to wait for GPU memory, if told.
        as_json: whether to print the document and nothing else.
    """

    options: Options
    with_checkpoint: bool
    profile: str
    state_dir: Path | None
    listen: bool
    image: bool
    probe_compile: bool
    wait_vram: float | None
    as_json: bool


def run_preflight(request: Request, machine: Machine) -> int:
    """Print a report.

    Returns:
        0 if all checks passed, 1 if something may be wrong, 2 if something is.

    Raises:
        OperatorError: a name or a value is wrong.
    """
    profile = chosen_profile(request.profile, request.options)
    _require_sense(request, profile)
    begin = machine.clock()
    findings = tuple(look(request, profile, machine))
    report = Report(
        version=__version__,
        profile=request.profile,
        checkpoint=str(request.options.checkpoint) if request.with_checkpoint else None,
        state=overall(findings),
        seconds=max(0.0, machine.clock() - begin),
        findings=findings,
    )
    if request.as_json:
        print(report.model_dump_json(indent=1))
    else:
        print_report(report)
    return report.exit_code


def look(request: Request, profile: Profile, machine: Machine) -> Iterator[Finding]:
    """The findings that a request asks for; ``profile`` is the one that it chose."""
    deployment = _deployment(request, profile)
    yield check_profile(profile)
    found: Checkpoint | OperatorError | None = None
    if request.with_checkpoint:
        found = _inspect(request.options.checkpoint)
        yield from check_checkpoint(found)
    checkpoint = found if isinstance(found, Checkpoint) else None
    if checkpoint is not None:
        try:
            check_fit(deployment, checkpoint.config.text_config)
        except OperatorError as error:
            yield of_error(PLAN, error)
            checkpoint = None
    subject = _subject(request, deployment, checkpoint, machine)
    if request.image:
        yield from of_image(machine, subject)
    else:
        yield _state_directory(request, machine)
        yield from of_start(machine, subject, listen=request.listen)
    if request.probe_compile:
        yield from check_compile(machine)


def _subject(
    request: Request, deployment: Deployment, checkpoint: Checkpoint | None, machine: Machine
) -> Subject:
    ranks = deployment.profile.ranks_per_node
    launch = build_launch(
        deployment,
        # Enough cores for the launch to be made; whether there are is a check.
        cores=[*machine.cores, *range(max(0, ranks - len(machine.cores)))],
        engine_command=python_module(ENGINE_MODULE),
    )
    wait = wait_seconds(request.wait_vram, deployment.profile, default=0.0)
    return subject_of(deployment, launch, checkpoint, machine=machine, wait_vram=wait)


def _deployment(request: Request, profile: Profile) -> Deployment:
    """As ``serve`` would decide it; whether somebody consented is a check, not an error."""
    consented = request.options.accept_lossy or EngineEnvironment.read().accept_lossy
    temporary = Path(tempfile.gettempdir())
    deployment = decide(
        replace(request.options, accept_lossy=True),
        profile,
        state_dir=temporary,
        socket_dir=socket_dir(NEXT_START, temporary),
        start_id=NEXT_START,
        consent_in_environment=False,
    )
    return replace(deployment, consent=deployment.consent if consented else None)


def _state_directory(request: Request, machine: Machine) -> Finding:
    try:
        directory = request.state_dir or default_state_dir()
    except OperatorError as error:
        return of_error(STATE, error)
    return look_at_state_dir(machine, directory.resolve())


def _inspect(path: Path) -> Checkpoint | OperatorError:
    try:
        return inspect_checkpoint(path)
    except OperatorError as error:
        return error


def _require_sense(request: Request, profile: Profile) -> None:
    if request.probe_compile and (profile.gpu is None or profile.gpu.architecture is not Architecture.GFX942):
        raise _usage(
            f"--probe-compile: profile {profile.name} has no use for the kernels, int4 for gfx942",
            "leave it out, or take --profile ep8",
        )
    without_effect = [
        name
        for name, given in (
            ("CHECKPOINT", request.with_checkpoint),
            ("--wait-vram", request.wait_vram is not None),
            ("--state-dir", request.state_dir is not None),
            ("--port", request.listen),
        )
        if given and request.image
    ]
    if without_effect:
        raise _usage(
            f"{' and '.join(without_effect)} with --image: an image has no checkpoint, GPU, state or port",
            "leave one of them out",
        )


def _usage(what: str, remedy: str) -> OperatorError:
    return OperatorError(what, remedy=remedy, exit_code=ExitCode.USAGE)
