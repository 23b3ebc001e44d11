# SPDX-License-Identifier: Apache-2.0
"""The command ``kimi-k3``: it only wires rooms together.

Rooms are imported inside the commands, so ``--help`` and a mistyped flag answer at once. Whatever an
operator can mend is one line on standard error; anything else keeps its traceback. A closed standard
output is ``/dev/null``, a full one is an error, and standard error never changes an exit code.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import typer

from kimi_k3 import __version__
from kimi_k3.errors import ExitCode, OperatorError, nearest
from kimi_k3.terminal import (
    NotWritten,
    ReaderGone,
    Terminated,
    end_cleanly,
    give_up_what_is_unwritten,
    mend_streams,
)
from kimi_k3.words.addresses import ENGINE_PORT, HOST, SIDECAR_PORT
from kimi_k3.words.given import given_path, require_text

# Without markup typer does not load rich, and a usage error is text that can be put on one line.
app = typer.Typer(
    name="kimi-k3",
    help="Serve Kimi-K3 with vLLM and see what happens.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
checkpoint_app = typer.Typer(help="Look at a checkpoint, or make a tiny one.", rich_markup_mode=None)
app.add_typer(checkpoint_app, name="checkpoint")
kernels_app = typer.Typer(
    help="Compile a profile's kernels ahead of time, or tell which are missing.", rich_markup_mode=None
)
app.add_typer(kernels_app, name="kernels")

Given = TypeVar("Given", str, int)

UsageError: Any = typer.BadParameter.__mro__[1]
"""The parser's usage error, wherever the installed typer keeps it."""

# Paths are text to the parser: it would take an empty one for the current directory.
StateDir = Annotated[
    str | None,
    typer.Option(
        metavar="<path>",
        help="Directory of the journal. Default: $KIMI_K3_STATE_DIR, else ~/.local/state/kimi-k3.",
        show_default=False,
    ),
]

Weights = Annotated[str | None, typer.Option(help="Routed experts as int4 (lossy) or mxfp4.")]
AcceptLossy = Annotated[
    bool, typer.Option("--accept-lossy", help="Consent to int4. Also: KIMI_K3_ACCEPT_LOSSY=1.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="name=value", help="Change the profile, e.g. max-model-len=65536."),
]
TensorParallelSize = Annotated[int | None, typer.Option(help="Ranks, up to 1024. Default: the profile's.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of prompt and answer.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Requests at a time, at most 65536.")]
ProfileHere = Annotated[
    str | None,
    typer.Option(help="Named deployment. Default: ep8 where /dev/kfd is, else cpu-tiny.", show_default=False),
]

NegativeScale = Annotated[
    bool,
    typer.Option(
        "--negative-scale/--no-negative-scale", help="Whether rule mse may choose negative scales, too."
    ),
]
AllowNonfinite = Annotated[
    bool,
    typer.Option(
        "--allow-nonfinite",
        help="Count groups with NaN or infinite values, which stay so, instead of stopping at them.",
    ),
]

# Of the commands in kernels_app.
ModelSizes = Annotated[
    str | None,
    typer.Argument(
        help="Directory with config.json, for its sizes. Default: Kimi-K3's as published.", show_default=False
    ),
]
Int4Profile = Annotated[str, typer.Option(help="Named deployment with int4 on gfx942.")]
Arch = Annotated[str, typer.Option(help="What to compile for: gfx942.")]
CacheDir = Annotated[
    str | None,
    typer.Option(
        metavar="<path>",
        help="Below it each build of AITER has a directory. Default: ~/.cache/kimi-k3/kernels.",
        show_default=False,
    ),
]


@app.command()
def serve(
    checkpoint: Annotated[str, typer.Argument(help="Directory with config.json and the shards.")],
    profile: ProfileHere = None,
    settings: Settings = None,
    weights: Weights = None,
    accept_lossy: AcceptLossy = False,
    scale_rule: Annotated[str | None, typer.Option(help="Scales of int4 by mse or amax.")] = None,
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
    state_dir: StateDir = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="<path>", help="File with the API key. Also: KIMI_K3_API_KEY.")
    ] = None,
    start_timeout: Annotated[float | None, typer.Option(help="Seconds until ready, up to 7 days.")] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds to finish requests, up to 7 days.")
    ] = None,
    wait_vram: Annotated[
        float | None,
        typer.Option(metavar="<seconds>", help="Wait so long for GPU memory that others free. Default: 60."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started.")] = False,
) -> int:
    """Check the checkpoint and the machine, start vLLM and follow it until it ends."""
    from kimi_k3.plan.options import Options
    from kimi_k3.preflight.device import usual_profile
    from kimi_k3.supervisor.serve import serve as serve_with
    from kimi_k3.words.environment import check_operators_environment

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
        settings=tuple(settings or ()),
    )
    return serve_with(
        options,
        profile_name=usual_profile() if profile is None else profile,
        state_dir=None if state_dir is None else given_path("--state-dir", state_dir, absolute=True),
        api_key_file=None if api_key_file is None else given_path("--api-key-file", api_key_file),
        wait_vram=wait_vram,
        dry_run=dry_run,
    )


@app.command()
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


@checkpoint_app.command()
def make(
    directory: Annotated[str, typer.Argument(help="New directory, about 14 MB.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights.")] = 0,
) -> None:
    """Write a tiny checkpoint with random weights in Kimi-K3's format."""
    from kimi_k3.checkpoint import make_tiny_checkpoint

    path = given_path("directory", directory)
    make_tiny_checkpoint(path, seed=seed)
    print(path)


@checkpoint_app.command()
def show(
    directory: Annotated[str, typer.Argument(help="Directory with config.json and the shards.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> int:
    """Show what a checkpoint holds and what is wrong with it; exit code 4 if it cannot be served."""
    from kimi_k3.checkpoint import inspect_checkpoint
    from kimi_k3.checkpoint.view import as_document, print_tables

    checkpoint = inspect_checkpoint(given_path("checkpoint", directory))
    if as_json:
        import json

        print(json.dumps(as_document(checkpoint), indent=1))
    else:
        print_tables(checkpoint)
    return ExitCode.BAD_CHECKPOINT if checkpoint.fatal else ExitCode.OK


@app.command()
def plan(
    checkpoint: Annotated[str, typer.Argument(help="Directory with config.json; nothing else is needed.")],
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
                settings=tuple(settings or ()),
            ),
            profile=profile,
            gpu=gpu,
            gigabytes_per_second=storage,
            as_json=as_json,
        )
    )


@app.command()
def preflight(
    checkpoint: Annotated[
        str | None, typer.Argument(help="Directory with config.json and the shards.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Named deployment. Default: as for serve; ep8 with --image.", show_default=False),
    ] = None,
    settings: Settings = None,
    weights: Weights = None,
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
    return run_preflight(
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


@kernels_app.command("build")
def kernels_build(
    checkpoint: ModelSizes = None,
    profile: Int4Profile = "ep8",
    arch: Arch = "gfx942",
    cache_dir: CacheDir = None,
    csv_only: Annotated[
        str | None,
        typer.Option(metavar="<path>", help="Only write the table of shapes and kernels there."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> int:
    """Compile the kernels that a profile needs, without a GPU; minutes to hours.

    The exit code is 0 if all were compiled, 1 if one was not, 2 for usage or if it is not possible here.
    """
    from kimi_k3.kernels.command import run_build

    return run_build(
        _kernels_request(checkpoint, profile, arch, cache_dir, as_json=as_json),
        csv_only=None if csv_only is None else given_path("--csv-only", csv_only, absolute=True),
    )


@kernels_app.command("check")
def kernels_check(
    checkpoint: ModelSizes = None,
    profile: Int4Profile = "ep8",
    arch: Arch = "gfx942",
    cache_dir: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> int:
    """Tell which kernels of a profile are compiled, without a GPU and without compiling.

    The exit code is 0 if all are, 1 if one is missing or cannot be told, 2 for usage or if it is not possible
    here.
    """
    from kimi_k3.kernels.command import run_check

    return run_check(_kernels_request(checkpoint, profile, arch, cache_dir, as_json=as_json))


def _kernels_request(
    checkpoint: str | None, profile: str, arch: str, cache_dir: str | None, *, as_json: bool
) -> Any:
    from kimi_k3.kernels.command import Request

    return Request(
        checkpoint=None if checkpoint is None else given_path("checkpoint", checkpoint, absolute=True),
        profile=profile,
        arch=arch,
        cache=None if cache_dir is None else given_path("--cache-dir", cache_dir, absolute=True),
        as_json=as_json,
    )


@app.command()
def backends(
    checkpoint: Annotated[str, typer.Argument(help="Directory with config.json; nothing else is needed.")],
    profile: Annotated[str, typer.Option(help="Named deployment, whose environment vLLM gets.")] = "ep8",
    weights: Annotated[str | None, typer.Option(help="Routed experts as int4 (lossy) or mxfp4.")] = None,
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


@app.command()
def convert_report(
    checkpoint: Annotated[str, typer.Argument(help="Directory with config.json and the shards.")],
    layers: Annotated[
        str | None, typer.Option(help="Numbers from 0, e.g. 1-3,7. Default: all with experts.")
    ] = None,
    rule: Annotated[str, typer.Option(help="Scales of int4 by mse or amax.")] = "mse",
    negative_scale: NegativeScale = True,
    allow_nonfinite: AllowNonfinite = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="<path>", help="Write the report there, too.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Continue an unfinished one.")] = True,
) -> int:
    """Show what int4 would cost a checkpoint, layer by layer; reads every expert, starts no engine."""
    _require_numbers("convert-report")
    from kimi_k3.conversion.files.report import Request, run_report
    from kimi_k3.plan.options import requantisation

    return run_report(
        Request(
            checkpoint=given_path("checkpoint", checkpoint),
            layers=layers,
            requantisation=requantisation(
                "--rule", rule, negative_scale=negative_scale, allow_nonfinite=allow_nonfinite
            ),
            json_file=None if json_file is None else given_path("--json", json_file),
            resume=resume,
        )
    )


@app.command()
def convert_file(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="npz with mxfp4_packed [E,N,K/2] and e8m0 [E,N,K/32], uint8.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="OUT", help="npz to write: packed, scale_bits, report (JSON).")
    ],
    rule: Annotated[str, typer.Option(help="Scales of int4 by mse or amax.")],
    layout: Annotated[str, typer.Option(help="Order of the result: aiter (for its kernels) or plain.")],
    device: Annotated[str, typer.Option(help="cpu, or cuda (ROCm devices as well).")] = "cpu",
    negative_scale: NegativeScale = True,
    allow_nonfinite: AllowNonfinite = False,
) -> None:
    """Convert the experts in a file, to compare them with those of another implementation."""
    _require_numbers("convert-file")
    from kimi_k3.conversion.files.models import Device
    from kimi_k3.conversion.files.npz import convert_file as convert
    from kimi_k3.plan.options import choose, requantisation
    from kimi_k3.words.weights import Int4Layout

    convert(
        given_path("IN", source),
        given_path("OUT", target),
        requantisation=requantisation(
            "--rule", rule, negative_scale=negative_scale, allow_nonfinite=allow_nonfinite
        ),
        layout=choose("--layout", layout, Int4Layout),
        device=choose("--device", device, Device),
    )


@app.command()
def demo(
    weights: Annotated[str, typer.Option(help="Routed experts as int4 (lossy) or mxfp4.")] = "int4",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the API, if it is free.")
    ] = ENGINE_PORT,
    sidecar_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the sidecar, if free.")
    ] = SIDECAR_PORT,
    once: Annotated[bool, typer.Option("--once", help="End after the first answer.")] = False,
) -> None:
    """Make a tiny checkpoint, serve it on this machine, ask it one question."""
    from kimi_k3.demo import run_demo
    from kimi_k3.plan.options import choose
    from kimi_k3.words.weights import Weights

    run_demo(weights=choose("--weights", weights, Weights), port=port, sidecar_port=sidecar_port, once=once)


@app.command()
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
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
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


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _once(option: str, values: list[Given] | None, remedy: str) -> Given | None:
    """The value of an option of which a second would contradict the first."""
    if values and len(values) > 1:
        given = ", ".join(map(str, values))
        raise OperatorError(f"{option} is given twice: {given}", remedy=remedy, exit_code=ExitCode.USAGE)
    return values[0] if values else None


def _require_numbers(command: str) -> None:
    """The commands of the conversion also run without an engine, which would have brought these along."""
    if missing := [name for name in ("numpy", "numba") if importlib.util.find_spec(name) is None]:
        what = " and ".join(missing)
        raise OperatorError(
            f"{command} needs {what}, not installed here", remedy=f"pip install {' '.join(missing)}"
        )


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code; an operator's mistake becomes one line."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="kimi-k3", standalone_mode=False)
        sys.stdout.flush()
    except OperatorError as error:
        return fail(str(error), error.exit_code)
    except UsageError as error:
        return fail(_usage(error), ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        print("kimi-k3: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except (ReaderGone, BrokenPipeError):
        return ExitCode.READER_GONE
    except Terminated as end:
        print(f"kimi-k3: ended by {end}", file=sys.stderr)
        return 128 + end.number
    except NotWritten as error:
        return fail(
            f"standard output: {error.strerror}; free some space or send it elsewhere", ExitCode.FAILED
        )
    finally:
        give_up_what_is_unwritten()
    return int(code or 0)


def fail(message: str, code: int) -> int:
    """Print the one line of an error."""
    print(f"kimi-k3: error: {message}", file=sys.stderr)
    return code


def _usage(error: Any) -> str:
    """One line for a usage error, with the nearest valid name when a name is not known."""
    context = error.ctx
    path = context.command_path if context is not None else "kimi-k3"
    what = " ".join(error.format_message().split())
    if (option := getattr(error, "option_name", None)) and context is not None:
        what = f"there is no option {option}"
        remedy = nearest(option, _options(context))
    elif what.startswith("No such command") and context is not None:
        name = what.split("'")[1]
        what = f"there is no command {name!r}"
        remedy = nearest(name, getattr(context.command, "commands", {}))
    else:
        what, remedy = what.rstrip("."), f"see '{path} --help'"
    command = path.removeprefix("kimi-k3").strip()
    return f"{command}: {what}; {remedy}" if command else f"{what}; {remedy}"


def _options(context: Any) -> Iterable[str]:
    for parameter in context.command.get_params(context):
        for spelling in (*parameter.opts, *parameter.secondary_opts):
            if spelling.startswith("-"):
                yield spelling


def main() -> None:
    """Run the command ``kimi-k3`` and exit."""
    mend_streams()
    try:
        end_cleanly(__name__)
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
