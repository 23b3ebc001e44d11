# SPDX-License-Identifier: Apache-2.0
"""A deployment and its end: ``kimi-k3 serve``, ``sidecar``, ``healthcheck``, ``demo`` and ``doctor``."""

from __future__ import annotations

import os
from typing import Annotated, TypeVar

import typer

from kimi_k3.cli.options import (
    AcceptLossy,
    AllowNonfinite,
    AsJson,
    CaFile,
    Checkpoint,
    LeaderAddress,
    LeaderPort,
    MaxModelLen,
    MaxNumSeqs,
    NegativeScale,
    NodeRank,
    RuleIfAny,
    Settings,
    StateDir,
    TensorParallelSize,
    Weights,
    WeightsIfAny,
)
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.addresses import ENGINE_PORT, HOST, SIDECAR_PORT
from kimi_k3.words.given import given_path, require_text

Given = TypeVar("Given", str, int)


def serve(
    checkpoint: Checkpoint,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Named deployment. Default: ep8 where /dev/kfd is, else cpu-tiny.", show_default=False
        ),
    ] = None,
    settings: Settings = None,
    weights: WeightsIfAny = None,
    accept_lossy: AcceptLossy = False,
    scale_rule: RuleIfAny = None,
    negative_scale: NegativeScale = True,
    allow_nonfinite: AllowNonfinite = False,
    host: Annotated[str, typer.Option(help="Address the engine listens on.")] = HOST,
    port: Annotated[int, typer.Option(help="Port the engine listens on.")] = ENGINE_PORT,
    served_model_name: Annotated[str, typer.Option(help="Model name in the API.")] = "kimi-k3",
    tensor_parallel_size: TensorParallelSize = None,
    expert_parallel: Annotated[
        bool | None,
        typer.Option("--expert-parallel/--no-expert-parallel", help="Whole experts per rank, not slices."),
    ] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    dtype: Annotated[str | None, typer.Option(help="Type of activations and other weights.")] = None,
    node_rank: NodeRank = None,
    leader_address: LeaderAddress = None,
    leader_port: LeaderPort = None,
    leader_sidecar: Annotated[
        str | None,
        typer.Option(
            metavar="<url>", help="Node 0's sidecar. Default: port 8001 at its address.", show_default=False
        ),
    ] = None,
    ca_file: CaFile = None,
    state_dir: StateDir = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="<path>", help="File with the API key. Also: KIMI_K3_API_KEY.")
    ] = None,
    tls_cert_file: Annotated[
        str | None, typer.Option(metavar="<path>", help="Serve TLS with this certificate (PEM).")
    ] = None,
    tls_key_file: Annotated[str | None, typer.Option(metavar="<path>", help="Its key.")] = None,
    start_timeout: Annotated[float | None, typer.Option(help="Seconds until ready, up to 7 days.")] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds to finish requests, up to 7 days.")
    ] = None,
    readiness_delay: Annotated[
        float | None,
        typer.Option(help="Seconds to go on serving after a signal, while readers already see: not ready."),
    ] = None,
    hang_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds without progress while requests run, until the engine is ended."),
    ] = None,
    wait_vram: Annotated[
        float | None,
        typer.Option(metavar="<seconds>", help="Wait so long for GPU memory that others free. Default: 60."),
    ] = None,
    probe_compile: Annotated[
        bool,
        typer.Option(
            "--probe-compile/--no-probe-compile",
            help="On gfx942 with int4, compile AITER's kernels apart from vLLM first, once for each build.",
        ),
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started.")] = False,
) -> int:
    """Check the checkpoint and the machine, start vLLM and follow it until it ends."""
    from kimi_k3.plan.options import Options
    from kimi_k3.preflight.device import usual_profile
    from kimi_k3.supervisor.serve import serve as serve_with
    from kimi_k3.words.environment import check_operators_environment
    from kimi_k3.words.tls import checked_certificate

    check_operators_environment(os.environ)
    options = Options(
        checkpoint=given_path("checkpoint", checkpoint, absolute=True),
        host=host,
        port=port,
        served_model_name=served_model_name,
        weights=weights,
        scale_rule=scale_rule,
        negative_scale=negative_scale,
        allow_nonfinite=allow_nonfinite,
        accept_lossy=accept_lossy,
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel=expert_parallel,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        start_timeout=start_timeout,
        drain_timeout=drain_timeout,
        readiness_delay=readiness_delay,
        hang_timeout=hang_timeout,
        tls=checked_certificate(
            None if tls_cert_file is None else given_path("--tls-cert-file", tls_cert_file, absolute=True),
            None if tls_key_file is None else given_path("--tls-key-file", tls_key_file, absolute=True),
            names=("--tls-cert-file", "--tls-key-file"),
        ),
        node_rank=node_rank,
        leader_address=leader_address,
        leader_port=leader_port,
        settings=tuple(settings or ()),
    )
    return serve_with(
        options,
        profile_name=usual_profile() if profile is None else profile,
        state_dir=None if state_dir is None else given_path("--state-dir", state_dir, absolute=True),
        api_key_file=None if api_key_file is None else given_path("--api-key-file", api_key_file),
        wait_vram=wait_vram,
        probe_compile=probe_compile,
        leader_sidecar=leader_sidecar,
        leader_authorities=None if ca_file is None else given_path("--ca-file", ca_file),
        dry_run=dry_run,
    )


def sidecar(
    state_dir: StateDir = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
) -> None:
    """Serve status, probes and metrics of a deployment."""
    from kimi_k3.sidecar.server import run as run_sidecar
    from kimi_k3.sidecar.settings import Settings

    given = {
        "state_dir": None if state_dir is None else given_path("--state-dir", state_dir, absolute=True),
        "host": None if host is None else require_text("--host", host),
        "port": port,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    run_sidecar(Settings.read().model_copy(update=chosen))


def healthcheck(
    state_dir: StateDir = None,
    alive: Annotated[
        bool, typer.Option("--alive", help="Ask only whether the supervisor hangs, as a liveness probe does.")
    ] = False,
) -> int:
    """Exit with 0 when traffic may come to this deployment, else with 1, and say why not."""
    from kimi_k3.sidecar.healthcheck import check, supervisor_lives
    from kimi_k3.sidecar.settings import Settings

    settings = Settings.read()
    if state_dir is not None:
        where = given_path("--state-dir", state_dir, absolute=True)
        settings = settings.model_copy(update={"state_dir": where})
    if alive:
        lives = supervisor_lives(settings)
        print("alive" if lives else "The supervisor no longer reports.")
        return ExitCode.OK if lives else ExitCode.FAILED
    found = check(settings)
    print("ready" if found.ready else " ".join(reason.message for reason in found.reasons))
    return ExitCode.OK if found.ready else ExitCode.FAILED


def demo(
    weights: Weights = "int4",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the API, if it is free.")
    ] = ENGINE_PORT,
    sidecar_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the sidecar, if free.")
    ] = SIDECAR_PORT,
    once: Annotated[bool, typer.Option("--once", help="End after the first answer.")] = False,
) -> None:
    """Serve the miniature, which comes with this program, on this machine; ask it one question."""
    from kimi_k3.demo import run_demo
    from kimi_k3.plan.options import choose
    from kimi_k3.words.weights import Weights

    run_demo(weights=choose("--weights", weights, Weights), port=port, sidecar_port=sidecar_port, once=once)


def doctor(
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<path>",
            help="Log of vLLM, of any size, also as gzip, bzip2 or xz; - is standard input.",
        ),
    ] = None,
    exit_code: Annotated[
        list[int] | None,
        typer.Option(help="How the engine ended: -9, or 137 as shells and containers tell it."),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            "--state-dir",
            metavar="<path>",
            help="Directory of the journal. Default without --log and --exit-code: as for serve.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Tell why an engine ended, from its log, exit code or journal.

    Exit code 0: a cause was found, or nothing failed (it runs, or ended on request); 1: unknown; 2: wrong
    usage; 6: the log or the state directory is missing or cannot be read. What is only noticed is no cause.
    """
    from kimi_k3.doctor.command import run_doctor

    path = _once("--log", log, "join the parts: cat PART... | kimi-k3 doctor --log -")
    directory = _once("--state", state, "ask for one after the other")
    return run_doctor(
        log=path if path is None or path == "-" else given_path("--log", path),
        exit_code=_once("--exit-code", exit_code, "give that of vLLM"),
        state_dir=None if directory is None else given_path("--state", directory, absolute=True),
        as_json=as_json,
    )


def _once(option: str, values: list[Given] | None, remedy: str) -> Given | None:
    """The value of an option of which a second would contradict the first."""
    if values and len(values) > 1:
        given = ", ".join(map(str, values))
        raise OperatorError(f"{option} is given twice: {given}", remedy=remedy, exit_code=ExitCode.USAGE)
    return values[0] if values else None
