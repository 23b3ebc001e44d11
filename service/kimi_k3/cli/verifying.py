# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 verify``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k3.cli.groups import group
from kimi_k3.cli.options import CaFile, WeightsIfAny
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.verify.target import Target
from kimi_k3.words.addresses import ENGINE_PORT, HOST, SIDECAR_PORT
from kimi_k3.words.given import given_path

if TYPE_CHECKING:
    from kimi_k3.verify.results import State

app = group("Ask a live deployment whether it serves what it should.")

DEFAULT_ENGINE = f"http://{HOST}:{ENGINE_PORT}"
DEFAULT_SIDECAR = f"http://{HOST}:{SIDECAR_PORT}"

EngineUrl = Annotated[str, typer.Option("--engine", help="URL of the API.")]
SidecarUrl = Annotated[str, typer.Option("--sidecar", help="URL of the sidecar.")]
NoSidecar = Annotated[
    bool, typer.Option("--no-sidecar", help="Ask no sidecar: the report cannot say what is served.")
]
MetricsUrl = Annotated[
    str | None,
    typer.Option(
        "--metrics", help="URL of vLLM's metrics. Default: /metrics of the API.", show_default=False
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option("--api-key-file", metavar="<path>", help="File with the API key. Also: KIMI_K3_API_KEY."),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="<path>",
        help="File with the sidecar's token. Default: $KIMI_K3_SIDECAR_TOKEN_FILE.",
        show_default=False,
    ),
]
Out = Annotated[
    str, typer.Option("--out", metavar="<path>", help="Directory of the results and of the report.")
]
DEFAULT_OUT = "verification"


@app.callback()
def verify() -> None:
    """Ask a live deployment whether it serves what it should."""


def _asking(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose first parameter is the deployment, with the options that say which one it is."""

    def asking(
        engine: EngineUrl = DEFAULT_ENGINE,
        sidecar: SidecarUrl = DEFAULT_SIDECAR,
        no_sidecar: NoSidecar = False,
        metrics: MetricsUrl = None,
        weights: WeightsIfAny = None,
        api_key_file: ApiKeyFile = None,
        token_file: TokenFile = None,
        ca_file: CaFile = None,
        **own: object,
    ) -> int:
        from kimi_k3.plan.options import choose
        from kimi_k3.plan.secret import read_api_key
        from kimi_k3.words.sidecar import read_token, sidecar_url
        from kimi_k3.words.weights import Weights

        base = sidecar_url(engine)
        target = Target(
            engine=base,
            sidecar=None if no_sidecar else sidecar_url(sidecar),
            metrics=f"{base}/metrics" if metrics is None else sidecar_url(metrics),
            weights=None if weights is None else choose("--weights", weights, Weights),
            api_key=read_api_key(_path("--api-key-file", api_key_file), os.environ),
            token=read_token(_path("--token-file", token_file), os.environ),
            authorities=_path("--ca-file", ca_file),
        )
        return command(target, **own)

    # Typer reads options off the signature: the deployment's, then the command's own.
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    shared = list(inspect.signature(asking, eval_str=True).parameters.values())[:-1]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *shared)]
    asking.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    asking.__annotations__ = {one.name: one.annotation for one in parameters}
    asking.__name__, asking.__doc__ = command.__name__, command.__doc__
    return asking


@app.command()
@_asking
def smoke(target: Target) -> int:
    """Ask for one completion, both scrapes and the consent; a line for each.

    The exit code is 0 if all is as it should be, else 1.
    """
    from kimi_k3.verify.smoke import run_smoke

    return run_smoke(target, report=print)


@app.command()
@_asking
def accuracy(
    target: Target,
    out: Out = DEFAULT_OUT,
    count: Annotated[int, typer.Option(min=5, max=1000, help="Questions.")] = 100,
    seed: Annotated[int, typer.Option(min=1, help="Of the questions.")] = 1,
    at_a_time: Annotated[int, typer.Option(min=1, max=256, help="Requests.")] = 8,
) -> int:
    """Ask held-out questions, keep what is predicted, and compare with other weights' predictions.

    Run it once for each way to serve, always with the same --out: mxfp4, then int4. The exit code is 1 if
    something that was checked is not as it should be.
    """
    from kimi_k3.verify.accuracy import run_accuracy

    path = given_path("--out", out)
    with _reporting(path):
        state = run_accuracy(target, path, count=count, seed=seed, at_a_time=at_a_time, report=_told)
    return _code(state)


@app.command()
@_asking
def kernel(
    target: Target,
    out: Out = DEFAULT_OUT,
    profile: Annotated[str, typer.Option(help="Whose environment the kernels get.")] = "ep8",
    reduced: Annotated[
        bool | None,
        typer.Option(
            "--reduced/--production",
            help="Size of the layer. Default: reduced for a profile that runs on CPUs.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Hold the int4 kernel of this machine against float32, in a process of its own.

    It needs vLLM here, and on a GPU 8 GiB that no engine uses: run it before a start. The exit code is 1 if
    the kernel computes wrongly or cannot be asked.
    """
    from kimi_k3.profiles.load import load_profile
    from kimi_k3.verify.kernel import run_kernel

    path = given_path("--out", out)
    with _reporting(path):
        state = run_kernel(target, path, profile=load_profile(profile), reduced=reduced, report=_told)
    return _code(state)


BenchCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="<path>",
        help="Directory with the served tokenizer. Default: where the server read it, if that is here, too.",
        show_default=False,
    ),
]
Sweeps = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="input/output/concurrency/prompts",
        help="One more load, e.g. 1024/128/4/40; may be given several times.",
    ),
]
Standard = Annotated[
    bool,
    typer.Option("--standard/--no-standard", help="Upstream's loads: 1024/128, 10 at 1 and 160 at 16."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the questions or prompts.")]
RemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the checkpoint's own Python code for its tokenizer."),
]


@app.command()
@_asking
def bench(
    target: Target,
    checkpoint: BenchCheckpoint = None,
    sweep: Sweeps = None,
    standard: Standard = True,
    seed: Seed = 0,
    trust_remote_code: RemoteCode = False,
    out: Out = DEFAULT_OUT,
) -> int:
    """Measure speed and errors with vLLM's own benchmark; a line for each load.

    The exit code is 0 if every request came back, else 1.
    """
    from kimi_k3.verify.bench import parse_load, run_bench

    path, sweeps = given_path("--out", out), [parse_load(text) for text in sweep or ()]
    with _reporting(path):
        state = run_bench(
            target,
            path,
            checkpoint=_path("--checkpoint", checkpoint),
            sweeps=sweeps,
            standard=standard,
            seed=seed,
            remote_code=trust_remote_code,
            report=_told,
        )
    return _code(state)


UpTo = Annotated[
    int | None,
    typer.Option(
        "--up-to",
        metavar="<tokens>",
        help="Longest prompt and answer together. Default: the server's limit.",
        show_default=False,
    ),
]
Each = Annotated[int, typer.Option("--each", min=1, help="Questions of each length.")]


@app.command()
@_asking
def long(target: Target, up_to: UpTo = None, each: Each = 6, seed: Seed = 0, out: Out = DEFAULT_OUT) -> int:
    """Look for codes in longer and longer texts; a line for each length.

    The exit code is 0 if every length is answered as it should be, else 1.
    """
    from kimi_k3.verify.long import run_long

    path = given_path("--out", out)
    with _reporting(path):
        state = run_long(target, path, up_to=up_to, each=each, seed=seed, report=_told)
    return _code(state)


@app.command()
def report(out: Out = DEFAULT_OUT) -> None:
    """Make the report anew from the results in a directory; each verification does it at its end, too."""
    from kimi_k3.journal.writer import now

    try:
        from kimi_k3.verify.report import write_report
    except ImportError as error:
        raise OperatorError(f"verify report: {error.name} is not installed", remedy=_INSTALL) from None
    _told(f"report: {write_report(given_path('--out', out), now())}")


_INSTALL = "pip install 'kimi-k3-gfx942[verify]'; the results are complete without it"


@contextmanager
def _reporting(out: Path) -> Iterator[None]:
    """The directory for this run alone; the report is made when the block has ended, however it ended."""
    from kimi_k3.verify.keeping import held, read_results

    with held(out):
        try:
            yield
        finally:
            try:
                if read_results(out):
                    report(str(out))
            except OperatorError as error:
                _told(f"no report: {error}")


DatasetOption = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="<path>",
        help="Directory with GSM8K, as downloaded (main/*.parquet) or train.jsonl and test.jsonl.",
        show_default=False,
    ),
]
Own = Annotated[
    bool,
    typer.Option("--own", help="Ask the miniature's own word problems. Default where it is served."),
]
First = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Ask only so many questions, the first ones.", show_default=False),
]
AtATime = Annotated[int, typer.Option("--concurrency", min=1, help="Requests at a time.")]


@app.command()
@_asking
def gsm8k(
    target: Target,
    dataset: DatasetOption = None,
    own: Own = False,
    limit: First = None,
    concurrency: AtATime = 16,
    out: Out = DEFAULT_OUT,
) -> int:
    """Ask GSM8K five-shot through lm_eval, as upstream did, and compare with what upstream published.

    The exit code is 0 if it agrees, else 1.
    """
    from kimi_k3.verify.gsm8k import run_gsm8k

    path = given_path("--out", out)
    with _reporting(path):
        state = run_gsm8k(
            target,
            path,
            dataset=_path("--dataset", dataset),
            own=own,
            limit=limit,
            concurrency=concurrency,
            report=_told,
        )
    return _code(state)


@app.command("all")
@_asking
def everything(
    target: Target,
    profile: Annotated[str, typer.Option(help="That is served.")],
    out: Out = DEFAULT_OUT,
    dataset: DatasetOption = None,
    checkpoint: BenchCheckpoint = None,
    trust_remote_code: RemoteCode = False,
    short: Annotated[
        bool | None,
        typer.Option(
            "--short/--full",
            help="How much is asked. Default: short for a profile that runs on CPUs.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Make every verification, one after the other, and print upstream's table of them.

    The exit code is 1 if anything failed; what was not run is no failure, and is said.
    """
    from kimi_k3.profiles.load import load_profile
    from kimi_k3.verify.everything import run_all

    path = given_path("--out", out)
    with _reporting(path):
        state = run_all(
            target,
            path,
            profile=load_profile(profile),
            dataset=_path("--dataset", dataset),
            checkpoint=_path("--checkpoint", checkpoint),
            remote_code=trust_remote_code,
            short=short,
            report=_told,
        )
    return _code(state)


def _told(line: str) -> None:
    """Printed at once: whoever reads from a pipe sees each measurement as it comes."""
    print(line, flush=True)


def _code(state: State) -> int:
    """Only a pass is 0: what was not run shows nothing."""
    return int(ExitCode.OK if state == "pass" else ExitCode.FAILED)


def _path(flag: str, given: str | None) -> Path | None:
    return None if given is None else given_path(flag, given)
