# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 plan``: what a start would use, before anything is started. Needs only a ``config.json``."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from kimi_k3.checkpoint import read_config
from kimi_k3.checkpoint.index import INDEX_NAME, read_index
from kimi_k3.errors import ExitCode, OperatorError, nearest
from kimi_k3.plan.chosen import chosen_profile
from kimi_k3.plan.compose import compose, usual_gpu
from kimi_k3.plan.fit import check_fit
from kimi_k3.plan.launch import ENGINE_MODULE, as_script, build_launch, socket_dir
from kimi_k3.plan.options import Options, decide
from kimi_k3.plan.report import Plan
from kimi_k3.plan.view import print_plan
from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.words.environment import (
    API_KEY,
    EngineEnvironment,
    check_operators_environment,
    default_state_dir,
)
from kimi_k3.words.gpus import GPUS, Gpu
from kimi_k3.words.python import python_module
from kimi_k3.words.text import printable

CONFIG = "config.json"
NEXT_START = "next"
"""Stands where a start has its own id, in the names of its directories."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line of one plan.

    Attributes:
        options: as of ``kimi-k3 serve``.
        profile: its name.
        gpu: name of a GPU; ``None`` for the smallest that the profile is for.
        gigabytes_per_second: of the storage.
        as_json: whether to print the document and nothing else.
    """

    options: Options
    profile: str
    gpu: str | None
    gigabytes_per_second: float | None
    as_json: bool


def run_plan(request: Request) -> int:
    """Print a plan.

    Returns:
        0 if it fits, 1 if not.

    Raises:
        OperatorError: the config, a name or a value is wrong.
    """
    check_operators_environment(os.environ)
    profiles = {name: load_profile(name) for name in profile_names()}
    profile = chosen_profile(request.profile, request.options)
    gpu = _gpu(request.gpu) if request.gpu is not None else usual_gpu(profile)
    if gpu is not None and profile.gpu is None:
        raise OperatorError(
            f"--gpu {gpu.name}: profile {profile.name} runs on a CPU",
            remedy="leave it out, or take another profile",
            exit_code=ExitCode.USAGE,
        )
    speed = request.gigabytes_per_second
    if speed is not None and not 1e-3 <= speed < 1e6:
        raise OperatorError(
            f"--storage {speed}: is no number of GB per second",
            remedy="give what the storage reads in one stream after another, e.g. 3.1",
            exit_code=ExitCode.USAGE,
        )
    options = request.options
    config = read_config(_config_path(options.checkpoint))
    consent = options.accept_lossy or EngineEnvironment.read().accept_lossy
    deployment = decide(
        # Whether somebody consented is part of a start; a plan only says that it is needed.
        replace(options, accept_lossy=True),
        profile,
        state_dir=default_state_dir(),
        socket_dir=socket_dir(NEXT_START, Path(tempfile.gettempdir())),
        start_id=NEXT_START,
        consent_in_environment=False,
        guarded=bool(os.environ.get(API_KEY)),
    )
    deployment = replace(deployment, consent=deployment.consent if consent else None)
    check_fit(deployment, config.text_config)
    launch = build_launch(
        deployment,
        # Of the machine that it will run on nothing is known here, but that each rank needs a core.
        cores=range(max(profile.ranks_per_node, len(os.sched_getaffinity(0)))),
        engine_command=python_module(ENGINE_MODULE),
    )
    plan = compose(
        config,
        deployment,
        launch,
        gpu,
        host_bytes=_physical_memory() if gpu is None else None,
        total_bytes=_total_bytes(options.checkpoint),
        bytes_per_second=None if speed is None else speed * 1e9,
        others=profiles.values(),
    )
    _print(plan, as_script(launch), as_json=request.as_json)
    return ExitCode.OK if plan.fits else ExitCode.FAILED


def _print(plan: Plan, script: str, *, as_json: bool) -> None:
    if as_json:
        print(plan.model_dump_json(indent=1))
    else:
        print_plan(plan, script)


def _total_bytes(checkpoint: Path) -> int | None:
    index = checkpoint / INDEX_NAME
    return read_index(index).total_size if index.exists() else None


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _config_path(checkpoint: Path) -> Path:
    """Of a directory; a file would become the checkpoint of the command."""
    try:
        is_file = checkpoint.is_file()
    except OSError as error:
        raise _no_checkpoint(checkpoint, error.strerror or str(error)) from None
    if is_file:
        raise _no_checkpoint(checkpoint, f"is a file; name the directory that holds {CONFIG}")
    return checkpoint / CONFIG


def _no_checkpoint(checkpoint: Path, why: str) -> OperatorError:
    return OperatorError(
        printable(f"checkpoint {str(checkpoint)[:200]}: {why}"),
        remedy=f"give a directory with a {CONFIG}",
        exit_code=ExitCode.USAGE,
    )


def _gpu(name: str) -> Gpu:
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise OperatorError(
            f"--gpu {name!r}: is not known here", remedy=nearest(name, GPUS), exit_code=ExitCode.USAGE
        ) from None
