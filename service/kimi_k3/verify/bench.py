# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 verify bench``: vLLM's own benchmark against the deployment, with upstream's loads and others.

``vllm bench serve`` runs as a process of its own (``kimi_k3.engine.bench``) with random prompts; its JSON and
its log stay beside the result. Upstream published that every request came back, and nothing of how fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import read_small
from kimi_k3.kernels.installed import VLLM_DISTRIBUTIONS
from kimi_k3.supervisor.child import die_with_parent
from kimi_k3.verify.asking import Api, api, shown, subject_of
from kimi_k3.verify.keeping import Broken, kept
from kimi_k3.verify.published import published
from kimi_k3.verify.results import Curve, Figure, Kind, Row, Setting, State
from kimi_k3.verify.target import Target
from kimi_k3.words.python import python_module
from kimi_k3.words.tls import is_loopback

MODULE: Final = "kimi_k3.engine.bench"
DIRECTORY: Final = "bench"
"""Below the directory of the results: vLLM's own JSON and log of each load."""

TOKENIZER_FILE: Final = "tokenizer_config.json"
WATCH_SECONDS: Final = 30.0
"""Between two looks whether the server still answers: for a silent one vLLM's benchmark waits six hours."""
ENDING_SECONDS: Final = 30.0
"""In which the benchmark may write down what it has when the server is gone."""
SPARE_TOKENS: Final = 16
"""For what a server puts around a prompt."""
LAST_BYTES: Final = 4096
NO_VLLM: Final = (
    "vLLM is not installed in this Python, and the benchmark is vLLM's own; run it where the engine is"
)
NO_TOKENIZER: Final = (
    "random prompts need the tokenizer, and it is not on this machine where the server read it; "
    "give --checkpoint"
)
MAX_JSON_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True)
class Load:
    """What is asked of the server at a time.

    Attributes:
        input, output: tokens of each prompt and of each answer.
        concurrency: requests at a time.
        prompts: requests in all.
    """

    input: int
    output: int
    concurrency: int
    prompts: int

    def __str__(self) -> str:
        return f"{self.input}/{self.output}, concurrency {self.concurrency}"

    @property
    def option(self) -> str:
        """As ``--sweep`` takes it."""
        return f"{self.input}/{self.output}/{self.concurrency}/{self.prompts}"

    @property
    def stem(self) -> str:
        """Name of its files."""
        return self.option.replace("/", "-")


UPSTREAM: Final = (Load(1024, 128, 1, 10), Load(1024, 128, 16, 160))
"""vllm-project/vllm#51274: 1K input / 128 output, 10 requests one by one, 160 at 16 a time."""


def parse_load(text: str) -> Load:
    """A load as ``--sweep`` takes it: ``1024/128/4/40``.

    Raises:
        OperatorError: it is none.
    """
    if re.fullmatch(r"[1-9][0-9]{0,7}(/[1-9][0-9]{0,7}){3}", text) is None:
        raise OperatorError(
            f"--sweep {text!r}: is no load",
            remedy="give input/output/concurrency/prompts as four whole numbers, e.g. 1024/128/4/40",
            exit_code=ExitCode.USAGE,
        )
    return Load(*map(int, text.split("/")))


def fits(load: Load, limit: int | None) -> bool:
    """Whether a server takes so long a prompt and answer; one that tells no limit is believed to."""
    return limit is None or load.input + load.output + SPARE_TOKENS <= limit


def fitted(load: Load, limit: int | None) -> Load:
    """The load itself, or one with its lengths halved until they fit, the prompt's first."""
    while not fits(load, limit) and max(load.input, load.output) > 1:
        if load.input > load.output:
            load = replace(load, input=load.input // 2)
        else:
            load = replace(load, output=load.output // 2)
    return load


def planned(sweeps: Iterable[Load], limit: int | None, *, standard: bool) -> list[tuple[Load, Load]]:
    """Each load to measure, and as it was wanted: upstream's are reduced to what fits, others must fit.

    Raises:
        OperatorError: one of ``sweeps`` does not, or there is nothing to measure.
    """
    loads = [(fitted(load, limit), load) for load in UPSTREAM] if standard else []
    for load in dict.fromkeys(sweeps):
        if not fits(load, limit):
            raise OperatorError(
                f"--sweep {load.option}: {load.input} + {load.output} tokens, and the server takes {limit}",
                remedy=f"leave {SPARE_TOKENS} tokens besides them",
                exit_code=ExitCode.USAGE,
            )
        if load not in (one for one, _ in loads):
            loads.append((load, load))
    if not loads:
        raise OperatorError(
            "verify bench: --no-standard and no --sweep leave nothing to measure",
            remedy="give --sweep, e.g. 1024/128/4/40",
            exit_code=ExitCode.USAGE,
        )
    return loads


class Measured(BaseModel):
    """What is read of the JSON that ``vllm bench serve --save-detailed`` writes; it holds more.

    Attributes:
        completed, failed: requests.
        output_lens: tokens of each answer, 0 of a failed one.
        errors: of each request, ``""`` where there was none.
        request_throughput, output_throughput: requests and tokens of answers per second.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    completed: int = Field(ge=0)
    failed: int = Field(ge=0)
    output_lens: tuple[int, ...]
    errors: tuple[str, ...]
    request_throughput: float
    output_throughput: float
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    median_tpot_ms: float
    p99_tpot_ms: float

    def whole(self, load: Load) -> int:
        """Answers with all their tokens.

        vLLM's benchmark asks for answers that go on to the last token, and counts one that broke off after
        its first as a success, if the server ended the stream in good order.
        """
        return sum(length == load.output for length in self.output_lens)


def read_measured(path: Path) -> Measured:
    """vLLM's JSON.

    Raises:
        Broken: there is none, or it lacks something.
    """
    try:
        return Measured.model_validate_json(read_small(path, limit=MAX_JSON_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise Broken(f"{path}: is no result of vllm bench serve: {where}: {first['msg']}") from None
    except OSError as error:
        raise Broken(f"{path}: cannot be read: {error.strerror or error}") from None


def compared(load: Load) -> str | None:
    """The name of what upstream published for exactly this load."""
    name = f"bench-{load.input}-{load.output}-concurrency-{load.concurrency}"
    one = published().get(name)
    return name if one is not None and one.count == load.prompts else None


def row_of(load: Load, wanted: Load, measured: Measured, limit: int | None) -> Row:
    """Whether every request came back, and whole."""
    whole = measured.whole(load)
    good = measured.completed == whole == load.prompts and measured.failed == 0
    told = [f"{measured.completed}/{load.prompts} requests without a server error"]
    if measured.completed > whole:
        told.append(f"{measured.completed - whole} of them without all {load.output} tokens")
    if first := next((error for error in measured.errors if error), None):
        told.append(f"the first error: {shown(first.strip().splitlines()[-1])}")
    if measured.completed:
        told.append(
            f"TTFT {measured.median_ttft_ms:.0f} ms, TPOT {measured.median_tpot_ms:.1f} ms (medians), "
            f"{measured.output_throughput:.1f} tokens/s"
        )
    if load != wanted:
        told.append(
            f"{load.input}/{load.output} instead of {wanted.input}/{wanted.output}, for the server takes "
            f"{limit} tokens: nothing published compares"
        )
    elif name := compared(load):
        one = published()[name]
        told.append(f"upstream: {one.value:.0f}/{one.count} ({one.hardware})")
    return Row(name=f"bench {load}", state=State.PASS if good else State.FAIL, evidence="; ".join(told))


def figures_of(load: Load, measured: Measured) -> list[Figure]:
    """The numbers of a load; of requests that never came back there are no times."""
    name = compared(load)
    one = published()[name] if name else None
    found = [
        Figure(
            name=f"{load}: requests that came back",
            value=measured.completed,
            count=load.prompts,
            published=one.value if one else None,
            source=one.source if one else None,
        ),
        Figure(name=f"{load}: errors", value=measured.failed, count=load.prompts),
    ]
    times = [
        (f"{what}, {how}", getattr(measured, f"{how}_{what.lower()}_ms"), "ms")
        for what in ("TTFT", "TPOT")
        for how in ("mean", "median", "p99")
        if what == "TTFT" or load.output > 1
    ]
    rates = [
        ("requests", measured.request_throughput, "requests/s"),
        ("output", measured.output_throughput, "tokens/s"),
    ]
    if measured.completed:
        found += [
            Figure(name=f"{load}: {what}", value=value, unit=unit, count=measured.completed)
            for what, value, unit in (*times, *rates)
        ]
    return found


def curves_of(found: Mapping[Load, Measured]) -> list[Curve]:
    """Throughput and TTFT over concurrency, a curve for each pair of lengths."""
    curves = []
    for lengths in dict.fromkeys((load.input, load.output) for load in found):
        points = sorted(
            ((load.concurrency, one) for load, one in found.items() if (load.input, load.output) == lengths),
            key=lambda point: point[0],
        )
        points = [(concurrency, one) for concurrency, one in points if one.completed]
        if not points:
            continue
        for plot, label, values in (
            ("throughput", "output tokens/s", [one.output_throughput for _, one in points]),
            ("time to first token", "median TTFT, ms", [one.median_ttft_ms for _, one in points]),
        ):
            curves.append(
                Curve(
                    plot=f"{plot} over concurrency",
                    name=f"{lengths[0]}/{lengths[1]}",
                    x_label="requests at a time",
                    y_label=label,
                    x=tuple(float(concurrency) for concurrency, _ in points),
                    y=tuple(values),
                )
            )
    return curves


def bench_command(
    load: Load, target: Target, model: str, tokenizer: Path, result: Path, *, seed: int, remote_code: bool
) -> list[str]:
    """The command whose JSON becomes ``result``; the key is not in it."""
    flags = [
        f"--base-url={target.engine}",
        f"--model={model}",
        f"--tokenizer={tokenizer}",
        "--backend=openai",
        "--endpoint=/v1/completions",
        "--dataset-name=random",
        f"--input-len={load.input}",
        f"--output-len={load.output}",
        f"--num-prompts={load.prompts}",
        f"--max-concurrency={load.concurrency}",
        f"--seed={seed}",
        "--temperature=0",
        "--percentile-metrics=ttft,tpot",
        "--metric-percentiles=99",
        "--disable-tqdm",
        "--save-result",
        "--save-detailed",
        f"--result-dir={result.parent}",
        f"--result-filename={result.name}",
    ]
    if remote_code:
        flags.append("--trust-remote-code")
    if target.engine.startswith("https:") and is_loopback(target.engine):
        # As everywhere here: on this machine itself nobody else answers (kimi_k3.words.tls).
        flags.append("--insecure")
    return [*python_module(MODULE), *flags]


def bench_environment(environ: Mapping[str, str], target: Target) -> dict[str, str]:
    """With the key and the authorities, and without what would lead elsewhere.

    vLLM's benchmark sends ``OPENAI_API_KEY`` to whatever it asks, goes through proxies, and looks for files
    on the hub; a key of somebody else's API is none of this server's business.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name != "OPENAI_API_KEY" and not name.lower().endswith("_proxy")
    }
    kept["HF_HUB_OFFLINE"] = "1"
    kept["PYTHONUNBUFFERED"] = "1"  # Else the log ends in what was printed long before the error.
    if target.api_key is not None:
        kept["OPENAI_API_KEY"] = target.api_key
    if target.authorities is not None:
        kept["SSL_CERT_FILE"] = str(target.authorities)
    return kept


def tokenizer_of(checkpoint: Path | None, served_from: str | None) -> Path | None:
    """The directory with the tokenizer: the given one, or where the server says it read it, if that is here.

    Raises:
        OperatorError: the given one has none.
    """
    if checkpoint is not None:
        if not (checkpoint / TOKENIZER_FILE).is_file():
            raise OperatorError(
                f"--checkpoint {checkpoint}: has no {TOKENIZER_FILE}",
                remedy="give the directory of the served checkpoint; the files of its tokenizer are enough",
                exit_code=ExitCode.USAGE,
            )
        return checkpoint
    if served_from is not None and (Path(served_from) / TOKENIZER_FILE).is_file():
        return Path(served_from)
    return None


def installed_vllm() -> str | None:
    """Name and version of the vLLM of this Python, ``None`` without one."""
    if find_spec("vllm") is None:
        return None
    for name in VLLM_DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "vllm"


def run_bench(
    target: Target,
    out: Path,
    *,
    checkpoint: Path | None,
    sweeps: Sequence[Load],
    standard: bool,
    seed: int,
    remote_code: bool,
    report: Callable[[str], None],
) -> State:
    """Measure each load and keep what is found; pass if every request came back.

    Args:
        standard: also upstream's two loads.
        seed: of the first load's prompts; the next ones add one: none meets another's cached prefixes.
        remote_code: the tokenizer is Python code that came with the checkpoint, and it may run.

    Raises:
        OperatorError: the deployment cannot be asked or is gone, or an option does not fit it.
    """
    subject = subject_of(target)
    with api(target) as engine:
        limit, served_from = _told(engine)
        tokenizer = tokenizer_of(checkpoint, served_from)
        loads = planned(sweeps, limit, standard=standard)
        client = installed_vllm()
        settings: dict[str, Setting] = {
            "loads": " ".join(load.option for load, _ in loads),
            "dataset": "random",
            "temperature": 0,
            "seed": seed,
            "server's length limit": limit,
            "tokenizer": None if tokenizer is None else str(tokenizer),
            "benchmark": client,
        }
        with kept(out, Kind.BENCH, subject, settings) as sheet:
            if client is None or tokenizer is None:
                why = NO_VLLM if client is None else NO_TOKENIZER
                sheet.note(
                    rows=[Row(name=f"bench {load}", state=State.NOT_RUN, evidence=why) for load, _ in loads]
                )
                for row in sheet.result.rows:
                    report(row.line)
                return sheet.result.state
            environment, found = bench_environment(os.environ, target), dict[Load, Measured]()
            for number, (load, wanted) in enumerate(loads):
                result = out / DIRECTORY / f"{load.stem}.json"
                command = bench_command(
                    load, target, engine.model, tokenizer, result, seed=seed + number, remote_code=remote_code
                )
                found[load] = measured = _measure(command, environment, result, engine)
                row = row_of(load, wanted, measured, limit)
                sheet.note(
                    rows=[*sheet.result.rows, row],
                    figures=[*sheet.result.figures, *figures_of(load, measured)],
                    curves=curves_of(found),
                )
                report(row.line)
                if measured.failed:
                    engine.length_limit()  # Broken, if it is gone: the next load would say nothing new.
    return sheet.result.state


def _told(engine: Api) -> tuple[int | None, str | None]:
    """The server's length limit, and where it read the model, before anything is measured."""
    try:
        return engine.length_limit(), engine.checkpoint_path()
    except Broken as error:
        raise OperatorError(f"verify bench: {error}", remedy="look at the server's log") from None


def _measure(command: Sequence[str], environment: Mapping[str, str], result: Path, engine: Api) -> Measured:
    """What vLLM's benchmark found.

    Raises:
        Broken: the server is gone and nothing was measured, or the benchmark failed.
        OperatorError: its directory takes no files.
    """
    log = result.with_suffix(".log")
    try:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)
        output = log.open("wb")
    except OSError as error:
        raise OperatorError(
            f"--out: cannot write {log}: {error.strerror or error}",
            remedy="give a writable directory with --out",
        ) from None
    with output:
        code = _run(command, environment, output.fileno(), engine)
    if code or not result.exists():
        engine.length_limit()
        raise Broken(f"vllm bench serve ended with exit code {code}: {_last_line(log)} ({log})")
    return read_measured(result)


def _run(command: Sequence[str], environment: Mapping[str, str], output: int, engine: Api) -> int:
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        preexec_fn=die_with_parent(os.getpid()),
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(WATCH_SECONDS)
                engine.length_limit()
        except Broken:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(ENDING_SECONDS)
            raise
        finally:
            process.kill()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - LAST_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return shown(lines[-1]) if lines else "it said nothing"
