# SPDX-License-Identifier: Apache-2.0
"""What can be known before a start: ``kimi-k3 plan``, ``preflight`` and ``backends``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kimi_k3.cli.options import (
    AcceptLossy,
    CheckpointConfig,
    CheckpointIfAny,
    LeaderAddress,
    LeaderPort,
    MaxModelLen,
    MaxNumSeqs,
    NodeRank,
    Settings,
    StateDir,
    TensorParallelSize,
    WeightsIfAny,
)
from kimi_k3.errors import ExitCode
from kimi_k3.words.addresses import ENGINE_PORT, HOST
from kimi_k3.words.given import given_path


def plan(
    checkpoint: CheckpointConfig,
    profile: Annotated[
        str, typer.Option(help="Named deployment. The plan is about its nodes, not about this machine.")
    ] = "ep8",
    gpu: Annotated[
        str | None, typer.Option(help="mi325x, mi300x or mi355x. Default: what the profile is for.")
    ] = None,
    settings: Settings = None,
    tensor_parallel_size: TensorParallelSize = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    storage: Annotated[
        float | None, typer.Option(help="GB per second that the storage delivers, to tell the time.")
    ] = None,
    node_rank: NodeRank = None,
    leader_address: LeaderAddress = None,
    leader_port: LeaderPort = None,
    accept_lossy: AcceptLossy = False,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON.")] = False,
) -> int:
    """Tell in a second whether a start will fit, what it will use, and what command will run.

    The exit code is 0 if it fits and 1 if it does not.
    """
    from kimi_k3.plan.command import Request, run_plan
    from kimi_k3.plan.options import Options

    return run_plan(
        Request(
            options=Options(
                checkpoint=given_path("checkpoint", checkpoint, absolute=True),
                host=HOST,
                port=ENGINE_PORT,
                served_model_name="kimi-k3",
                accept_lossy=accept_lossy,
                tensor_parallel_size=tensor_parallel_size,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                node_rank=node_rank,
                leader_address=leader_address,
                leader_port=leader_port,
                settings=tuple(settings or ()),
            ),
            profile=profile,
            gpu=gpu,
            gigabytes_per_second=storage,
            as_json=as_json,
        )
    )


def preflight(
    checkpoint: CheckpointIfAny = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Named deployment. Default: as for serve; ep8 with --image.", show_default=False),
    ] = None,
    settings: Settings = None,
    weights: WeightsIfAny = None,
    accept_lossy: AcceptLossy = False,
    tensor_parallel_size: TensorParallelSize = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    port: Annotated[int | None, typer.Option(help="Port that must be free. Default: none is tried.")] = None,
    state_dir: StateDir = None,
    wait_vram: Annotated[
        float | None,
        typer.Option(metavar="<seconds>", help="Wait so long for GPU memory that others free. Default: 0."),
    ] = None,
    probe_compile: Annotated[
        bool, typer.Option("--probe-compile", help="Compile AITER's int4 kernels for gfx942, too; minutes.")
    ] = False,
    image: Annotated[
        bool,
        typer.Option("--image", help="Only what is known while an image is built: no GPU, no checkpoint."),
    ] = False,
    warnings_pass: Annotated[
        bool, typer.Option("--warnings-pass", help="Exit code 0 unless a start would fail.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> int:
    """Check this machine for a start, in seconds, without starting anything.

    The exit code is 0 if all is well, 1 if something may be wrong or is unknown, 2 if a start would fail.
    """
    from pathlib import Path

    from kimi_k3.plan.options import Options
    from kimi_k3.preflight.command import Request, run_preflight
    from kimi_k3.preflight.device import usual_profile
    from kimi_k3.preflight.machine import Machine
    from kimi_k3.words.environment import check_operators_environment

    check_operators_environment(os.environ)
    path = None if checkpoint is None else given_path("checkpoint", checkpoint, absolute=True)
    code = run_preflight(
        Request(
            options=Options(
                checkpoint=path or Path("CHECKPOINT"),
                host=HOST,
                port=ENGINE_PORT if port is None else port,
                served_model_name="kimi-k3",
                weights=weights,
                accept_lossy=accept_lossy,
                tensor_parallel_size=tensor_parallel_size,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                settings=tuple(settings or ()),
            ),
            with_checkpoint=path is not None,
            profile=usual_profile(image=image) if profile is None else profile,
            state_dir=None if state_dir is None else given_path("--state-dir", state_dir, absolute=True),
            listen=port is not None,
            image=image,
            probe_compile=probe_compile,
            wait_vram=wait_vram,
            as_json=as_json,
        ),
        Machine(),
    )
    return ExitCode.OK if warnings_pass and code == ExitCode.FAILED else code


def backends(
    checkpoint: CheckpointConfig,
    profile: Annotated[str, typer.Option(help="Named deployment, whose environment vLLM gets.")] = "ep8",
    weights: WeightsIfAny = None,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON.")] = False,
) -> int:
    """Ask vLLM which kernels it would compute the experts with on this machine, and why not with others.

    The exit code is 0 if there are some and 1 if there are none.
    """
    from kimi_k3.backends import run_backends

    return run_backends(
        given_path("checkpoint", checkpoint, absolute=True),
        profile_name=profile,
        weights=weights,
        as_json=as_json,
    )
