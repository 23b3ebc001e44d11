# SPDX-License-Identifier: Apache-2.0
"""lm_eval as a program of its own: what it is told, what it finds, and what is left if it breaks off.

lm_eval writes results only at its end. But its cache (``--use_cache``) takes every answer as it comes, under
a hash of the prompt and of how it was to be answered; the model is no part of it. So after a broken run
lm_eval itself scores what was answered: once more, over a copy of the cache, with its ``dummy`` model for
the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from kimi_k3.supervisor.child import Child
from kimi_k3.supervisor.redact import Secrets
from kimi_k3.verify.asking import ANSWER_SECONDS, shown
from kimi_k3.verify.keeping import Broken
from kimi_k3.verify.statistics import mean_and_error
from kimi_k3.verify.target import Target
from kimi_k3.words.python import python_module
from kimi_k3.words.tls import is_loopback

FILTERS = ("strict-match", "flexible-extract")
"""lm_eval's two readings of an answer to GSM8K: what follows ``####``, and the last number."""

SHOTS = 5
TEMPERATURE = 0.0
ANSWER_TOKENS = 512
"""``num_fewshot``, ``temperature``, ``max_gen_toks`` of upstream's validation (vllm-project/vllm#51274)."""

RETRIES = 3
"""lm_eval's own default."""

POLL_SECONDS = 0.1
STALL_SECONDS = ANSWER_SECONDS
"""Without one more answer for so long, nobody answers any more."""

END_SECONDS = 10.0
ERROR = re.compile(r"(?:\w+\.)*(?P<kind>\w*(?:Error|Exception|Disconnected))(?:$|: ?(?P<text>.*))")
"""The last line of a traceback. The first such line tells most: what follows it, it has caused."""

REFUSED = "API request failed"
"""lm_eval says this with what the server answered."""

NO_ANSWER = "lol"
"""What lm_eval's ``dummy`` model says to everything."""

_TAKEN_OFF = ("KIMI_K3_API_KEY", "HF_TOKEN", "LOCAL_RANK", "RANK", "WORLD_SIZE")
"""Secrets that lm_eval has no use for, and what makes it one process of several."""


@dataclass(frozen=True)
class Score:
    """The share of right answers by one filter.

    Attributes:
        error: standard error as lm_eval computes it; ``None`` where it cannot be, of one question.
        count: of answered questions.
    """

    share: float
    error: float | None
    count: int

    @property
    def right(self) -> int:
        """Number of right answers."""
        return round(self.share * self.count)


@dataclass(frozen=True)
class Run:
    """What lm_eval is to do.

    Attributes:
        directory: of everything that it is given and writes; there already, and of this run alone.
        scratch: of what is worth nothing afterwards.
        task: name of the task that :func:`write_task` wrote into ``directory``.
        limit: ask only the first questions.
    """

    directory: Path
    scratch: Path
    task: str
    model: str
    concurrency: int
    answer_tokens: int
    limit: int | None

    @property
    def log(self) -> Path:
        """What lm_eval prints."""
        return self.directory / "lm_eval.log"

    @property
    def answers(self) -> Path:
        """lm_eval's cache, by the name that it gives it."""
        return self.scratch / "answers_rank0.db"


def version() -> str | None:
    """lm_eval's version, ``None`` if it is not installed."""
    try:
        return metadata.version("lm_eval")
    except metadata.PackageNotFoundError:
        return None


def definition() -> Path:
    """lm_eval's own task GSM8K, a YAML file; found without importing lm_eval, which takes seconds."""
    found = util.find_spec("lm_eval")
    assert found is not None, "version() says that it is installed"
    assert found.origin is not None, "lm_eval is a package with an __init__.py"
    return Path(found.origin).parent / "tasks" / "gsm8k" / "gsm8k.yaml"


def write_task(directory: Path, task: str, reader: str, train: Sequence[Path], test: Sequence[Path]) -> None:
    """lm_eval's GSM8K with other files, and nothing else changed.

    Args:
        task: its name.
        reader: of the files, ``json`` or ``parquet``: the ``datasets`` library's word for it.
    """
    files = {"train": [str(path) for path in train], "test": [str(path) for path in test]}
    text = {
        "include": str(definition()),
        "task": task,
        "dataset_path": reader,
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
    }
    _write(directory / "task.yaml", text)


def configuration(run: Run, target: Target) -> dict[str, Any]:
    """lm_eval's settings, as ``lm_eval run --config`` reads them.

    No tokenizer: the server counts the tokens itself, and prompts go to it as text.
    """
    return _common(run, run.scratch / "answers", run.directory / "lm_eval") | {
        "model": "local-completions",
        "model_args": {
            "model": run.model,
            "base_url": f"{target.engine}/v1/completions",
            "tokenizer_backend": None,
            "tokenized_requests": False,
            "num_concurrent": run.concurrency,
            "max_retries": RETRIES,
            "timeout": int(ANSWER_SECONDS),
            # As our own requests: on this machine itself no certificate is checked.
            "verify_certificate": not is_loopback(target.engine),
        },
    }


def _common(run: Run, cache: Path, output: Path) -> dict[str, Any]:
    """What decides the prompts, and with them under which name an answer is in the cache."""
    return {
        "tasks": [str(run.directory / "task.yaml")],
        "num_fewshot": SHOTS,
        "gen_kwargs": {"temperature": TEMPERATURE, "max_gen_toks": run.answer_tokens},
        "limit": run.limit,
        "use_cache": str(cache),
        "log_samples": True,
        "output_path": str(output),
    }


def environment(target: Target, scratch: Path, around: Mapping[str, str]) -> dict[str, str]:
    """Variables for lm_eval: the key, whom to trust, nothing from a network but the server's answers.

    lm_eval does not hand its setting for authorities to these requests. With several at a time Python's
    ``ssl`` reads ``SSL_CERT_FILE``, with one at a time ``requests`` reads ``REQUESTS_CA_BUNDLE``; that would
    also put what ``.netrc`` holds in the place of the key.
    """
    kept = {
        name: value
        for name, value in around.items()
        if name not in _TAKEN_OFF and not name.lower().endswith("_proxy")
    }
    system = ssl.get_default_verify_paths()
    trusted = str(target.authorities or system.cafile or system.capath or "")
    if target.authorities is not None:
        kept["SSL_CERT_FILE"] = trusted
    return kept | {
        "OPENAI_API_KEY": target.api_key or "",
        "REQUESTS_CA_BUNDLE": trusted,
        "NETRC": os.devnull,
        "HF_HOME": str(scratch / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
    }


def ask(run: Run, target: Target, *, answered: Callable[[int], None]) -> dict[str, Score]:
    """All questions in one run of lm_eval; the score by each filter.

    Args:
        answered: is told how many answers there are, as they come.

    Raises:
        Broken: the server is gone, answers with errors, or not at all.
    """
    _write(run.directory / "lm_eval.yaml", configuration(run, target))
    known, since = 0, time.monotonic()
    with _running(run.directory / "lm_eval.yaml", run.log, target, run.scratch) as child:
        while not _ended(child, 10 * POLL_SECONDS):
            count = answers_so_far(run)
            if count != known:
                known, since = count, time.monotonic()
                answered(count)
            elif time.monotonic() - since > STALL_SECONDS:
                raise Broken(f"no answer for {STALL_SECONDS:.0f} s; lm_eval's log is {run.log}")
    if child.poll() != 0:
        raise Broken(f"{reason(run.log.read_text(errors='replace'))}; lm_eval's log is {run.log}")
    return read_scores(run.directory / "lm_eval", run.task)


def answers_so_far(run: Run) -> int:
    """Answers in lm_eval's cache; 0 while there is none."""
    if not run.answers.exists():
        return 0
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"{run.answers.as_uri()}?mode=ro", uri=True)) as cache,
    ):
        return int(cache.execute("SELECT COUNT(*) FROM unnamed").fetchone()[0])
    return 0


def score_answered(run: Run) -> dict[str, Score]:
    """What a broken run had answered, scored by lm_eval itself; nobody is asked.

    Raises:
        Broken: lm_eval could not do it, or nothing was answered.
    """
    count = answers_so_far(run)
    if not count:
        raise Broken("nothing was answered")
    directory = run.scratch / "answered"
    directory.mkdir()
    with (
        contextlib.closing(sqlite3.connect(run.answers)) as source,
        contextlib.closing(sqlite3.connect(directory / "answers_rank0.db")) as copy,
    ):
        source.backup(copy)
    settings = _common(run, directory / "answers", directory / "lm_eval")
    _write(directory / "lm_eval.yaml", settings | {"model": "dummy", "model_args": {}})
    nobody = Target(engine="", sidecar=None, metrics="", weights=None, api_key=None, token=None)
    log = run.directory / "answered.log"
    with _running(directory / "lm_eval.yaml", log, nobody, run.scratch) as child:
        if not _ended(child, STALL_SECONDS):
            raise Broken(f"lm_eval does not end; its log is {log}")
    if child.poll() != 0:
        raise Broken(f"{reason(log.read_text(errors='replace'))}; lm_eval's log is {log}")
    path = _only(directory / "lm_eval", "samples_*.jsonl")
    # Not splitlines: lm_eval writes other languages' line ends as they are.
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    scores = {}
    for name in FILTERS:
        right = [
            float(sample["exact_match"])
            for sample in samples
            if sample["filter"] == name and sample["resps"] != [[NO_ANSWER]]
        ]
        if len(right) != count:
            raise Broken(f"lm_eval finds {len(right)} of {count} answers again; its log is {log}")
        share, error = mean_and_error(right)
        scores[name] = Score(share, error, len(right))
    return scores


def read_scores(directory: Path, task: str) -> dict[str, Score]:
    """What lm_eval wrote at its end.

    Raises:
        Broken: it wrote none, or something else.
    """
    path = _only(directory, "results_*.json")
    try:
        found = json.loads(path.read_text())
        count = int(found["n-samples"][task]["effective"])
        results = found["results"][task]
        return {
            name: Score(
                share=float(results[f"exact_match,{name}"]),
                error=_number(results.get(f"exact_match_stderr,{name}")),
                count=count,
            )
            for name in FILTERS
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Broken(f"{path}: not what lm_eval 0.4.13 writes: {type(error).__name__}: {error}") from None


def reason(log: str) -> str:
    """Why lm_eval ended, in one line, from what it printed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = (ERROR.match(line) for line in lines)
    first = next((found for found in errors if found and found["kind"] != "CancelledError"), None)
    if first is None:
        return f"lm_eval ended: {shown(lines[-1]) if lines else 'without a word'}"
    kind, text = first["kind"], shown(first["text"] or "")
    refused = [line.partition(REFUSED)[2].lstrip("! ") for line in lines if REFUSED in line]
    if kind in ("ClientResponseError", "HTTPError") and refused:
        return f"the server answers with an error: {shown(refused[-1].removesuffix(' Retrying...'))}"
    if kind == "TimeoutError":
        return f"no answer within {ANSWER_SECONDS:.0f} s"
    if re.search("Connect|Disconnect|ClientOSError|Payload|Protocol", kind):
        return f"the server is gone ({text or kind})"
    return f"lm_eval ended: {kind}: {text}"


@contextlib.contextmanager
def _running(settings: Path, log: Path, target: Target, scratch: Path) -> Iterator[Child]:
    """lm_eval, ended with the block; its log is complete then, and without the key, which lm_eval prints."""
    variables = environment(target, scratch, os.environ)
    with log.open("w", encoding="utf-8") as output:
        child = Child(
            python_module("lm_eval", "run", "--config", str(settings)),
            variables,
            secrets=Secrets([target.api_key]),
            sink=lambda line: print(line, file=output, flush=True),
        )
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
            if not _ended(child, END_SECONDS):
                os.killpg(child.pid, signal.SIGKILL)
            child.close(seconds=END_SECONDS)


def _ended(child: Child, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return child.poll() is not None


def _only(directory: Path, pattern: str) -> Path:
    """The one file of that name, below a directory of one run."""
    found = sorted(directory.rglob(pattern))
    if not found:
        raise Broken(f"lm_eval ended well and wrote no {pattern} into {directory}")
    return found[-1]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _write(path: Path, settings: Mapping[str, Any]) -> None:
    # JSON is YAML, too.
    path.write_text(json.dumps(settings, indent=1) + "\n")
