# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 verify all``: every verification of a live deployment in turn, and upstream's table of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.errors import OperatorError
from kimi_k3.journal.writer import now
from kimi_k3.profiles.schema import Profile
from kimi_k3.sidecar.status import Status
from kimi_k3.verify import smoke
from kimi_k3.verify.accuracy import run_accuracy
from kimi_k3.verify.asking import api, subject_of
from kimi_k3.verify.bench import parse_load, run_bench, tokenizer_of
from kimi_k3.verify.dataset import read_dataset
from kimi_k3.verify.gsm8k import run_gsm8k
from kimi_k3.verify.harness import SHOTS
from kimi_k3.verify.keeping import Sheet, kept, read_results
from kimi_k3.verify.kernel import run_kernel
from kimi_k3.verify.long import run_long
from kimi_k3.verify.results import Kind, Row, State
from kimi_k3.verify.target import Target
from kimi_k3.verify.validation import validation
from kimi_k3.watch.client import NoAnswer, NotUnderstood, Sidecar
from kimi_k3.words.phases import Phase

Report = Callable[[str], None]


@dataclass(frozen=True)
class Extent:
    """How much is asked.

    Attributes:
        questions: of ``accuracy``.
        problems: of the miniature's own word problems, where there is no GSM8K; ``None`` for all.
        sweeps: loads of ``bench`` beside upstream's.
        standard: whether upstream's loads are made.
        each: of each length of ``long``.
        at_a_time: requests.
    """

    questions: int
    problems: int | None
    sweeps: tuple[str, ...]
    standard: bool
    each: int
    at_a_time: int


FULL = Extent(questions=200, problems=None, sweeps=(), standard=True, each=30, at_a_time=16)
SHORT = Extent(
    questions=40,
    problems=20,
    sweeps=("128/16/1/4", "128/16/4/12"),
    standard=False,
    each=3,
    at_a_time=8,
)
"""For a CPU: minutes, where upstream's loads alone would take hours at a few tokens a second."""


def run_all(
    target: Target,
    out: Path,
    *,
    profile: Profile,
    dataset: Path | None,
    checkpoint: Path | None,
    remote_code: bool,
    short: bool | None,
    report: Report,
) -> State:
    """Make every verification; one that fails does not end the others, a server that is gone does.

    Args:
        profile: that is served; of the kernel's environment, too.
        dataset: directory with GSM8K; ``None`` for the miniature's own questions.
        checkpoint: with the served tokenizer.
        remote_code: whether the tokenizer's own code may run.
        short: whether little is asked; ``None`` for what suits the profile's device.

    Returns:
        Fail if anything failed.

    Raises:
        OperatorError: the deployment cannot be asked, serves another profile, or is gone.
    """
    # Hours before they are needed: what is mistyped is told now.
    if dataset is not None:
        read_dataset(dataset, SHOTS)
    tokenizer_of(checkpoint, None)
    subject = subject_of(target)
    if subject.profile not in (None, profile.name):
        raise OperatorError(
            f"verify all: {target.engine} serves profile {subject.profile}, and {profile.name} was asked for",
            remedy=f"give --profile {subject.profile}, or the URLs of the other deployment",
        )
    on_gpus = profile.gpu is not None
    extent = SHORT if (not on_gpus if short is None else short) else FULL
    parts: dict[Kind, Callable[[], object]] = {
        Kind.SMOKE: lambda: _smoke(target, out, report),
        Kind.ACCURACY: lambda: run_accuracy(
            target, out, count=extent.questions, seed=1, at_a_time=extent.at_a_time, report=report
        ),
        Kind.GSM8K: lambda: run_gsm8k(
            target,
            out,
            dataset=dataset,
            own=dataset is None,
            limit=extent.problems if dataset is None else None,
            concurrency=extent.at_a_time,
            report=report,
        ),
        Kind.LONG: lambda: run_long(target, out, up_to=None, each=extent.each, seed=1, report=report),
        Kind.BENCH: lambda: run_bench(
            target,
            out,
            checkpoint=checkpoint,
            sweeps=[parse_load(text) for text in extent.sweeps],
            standard=extent.standard,
            seed=1,
            remote_code=remote_code,
            report=report,
        ),
    }
    if not on_gpus:
        # On GPUs the engine has all memory: there it is run before the start, with the same --out.
        parts[Kind.KERNEL] = lambda: run_kernel(target, out, profile=profile, reduced=None, report=report)
    for kind, part in parts.items():
        report(f"--- {kind}")
        began = now()
        try:
            part()
        except OperatorError as error:
            report(f"fail: {error}")
            if not any(one.kind is kind and one.began >= began for one in read_results(out)):
                # It failed before it measured: an earlier run's pass must not stand for it.
                Sheet(out, kind, subject, {}).note(broken_off=str(error))
            with api(target):
                continue  # it still answers, so the next one has a chance
    rows = validation(read_results(out))
    report("--- what upstream validated")
    for row in rows:
        report(row.line)
    return State.FAIL if any(row.state is State.FAIL for row in rows) else State.PASS


def _smoke(target: Target, out: Path, report: Report) -> None:
    """The checks of ``verify smoke``, kept."""
    if target.sidecar is None:
        raise OperatorError("verify smoke: --no-sidecar leaves nothing to ask", remedy="give --sidecar")
    with kept(out, Kind.SMOKE, subject_of(target), {}) as sheet:
        for row in (_graphs(target.sidecar, target), *smoke.rows(target)):
            sheet.note(rows=[*sheet.result.rows, row])
            report(row.line)


def _graphs(url: str, target: Target) -> Row:
    """Whether the start went through the phase in which graphs are captured."""
    sidecar = Sidecar(url, target.token, target.authorities)
    try:
        history = sidecar.ask("/status", Status).history
    except (NoAnswer, NotUnderstood) as error:
        return Row(name="graphs", state=State.FAIL, evidence=str(error))
    finally:
        sidecar.close()
    captured = [span for span in history if span.phase is Phase.CAPTURING]
    if not captured:
        return Row(name="graphs", state=State.NOT_RUN, evidence="this start captured none (--enforce-eager)")
    seconds = captured[-1].seconds
    took = "" if seconds is None else f" in {seconds:.0f} s"
    return Row(name="graphs", state=State.PASS, evidence=f"captured{took}")
