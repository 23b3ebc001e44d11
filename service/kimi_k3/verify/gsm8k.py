# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 verify gsm8k``: school mathematics, five-shot, through lm_eval, as upstream asked.

One run of lm_eval over all questions, so that the figures can be compared. Without GSM8K's files the
miniature is asked word problems of the kind it was taught, by the same task, filters and settings.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.terminal import NotWritten
from kimi_k3.verify import harness
from kimi_k3.verify.asking import Api, api, subject_of
from kimi_k3.verify.dataset import GSM8K_QUESTIONS, HOW_TO_GET, Dataset, read_dataset, write_dataset
from kimi_k3.verify.harness import FILTERS, SHOTS, Run, Score
from kimi_k3.verify.keeping import Broken, Sheet, kept
from kimi_k3.verify.published import Published, published
from kimi_k3.verify.questions import held_out_examples
from kimi_k3.verify.results import Figure, Kind, Row, Setting, State
from kimi_k3.verify.statistics import wilson
from kimi_k3.verify.target import Target

SCRATCH: Final = "scratch"
"""Beside a run's evidence: lm_eval's caches."""

OWN_CHECKPOINT: Final = "miniature"
OWN_TASK: Final = "miniature_word_problems"
OWN_SHOWN: Final = 100
OWN_ASKED: Final = 100
"""Held-out word problems of which the shots are drawn, and that are asked if no other number is given."""

OWN_SHARE: Final = 0.95
"""Of held-out questions the miniature answers at least so many."""

STANDARD_ERRORS: Final = 3.0
LEAST_ANSWER_TOKENS: Final = 64
"""Fewer hold no worked answer."""

PROMPT_MARGIN: Final = 16
"""Tokens for what a server adds to a prompt."""


def run_gsm8k(
    target: Target,
    out: Path,
    *,
    dataset: Path | None,
    own: bool,
    limit: int | None,
    concurrency: int,
    report: Callable[[str], None],
) -> State:
    """Ask, write and tell.

    Args:
        dataset: directory with GSM8K; ``None`` for the miniature's own questions.
        own: ask those in any case.
        limit: ask only the first questions, in the dataset's order.
        concurrency: requests at a time.

    Raises:
        OperatorError: nothing to ask, no deployment, no room for an answer, or the server went away.
    """
    if own and dataset is not None:
        raise OperatorError(
            "--own and --dataset are two sets of questions",
            remedy="give one of them",
            exit_code=ExitCode.USAGE,
        )
    subject = subject_of(target)
    if dataset is None and not own and subject.checkpoint != OWN_CHECKPOINT:
        raise OperatorError(
            "verify gsm8k: there are no questions", remedy=HOW_TO_GET, exit_code=ExitCode.USAGE
        )
    known = harness.version()
    settings: dict[str, Setting] = {
        "task": OWN_TASK if dataset is None else "gsm8k",
        "dataset": "held-out word problems" if dataset is None else str(dataset),
        "num_fewshot": SHOTS,
        "temperature": harness.TEMPERATURE,
        "max_gen_toks": harness.ANSWER_TOKENS,
        "limit": limit,
        "concurrency": concurrency,
        "lm_eval": known,
    }
    if known is None:
        with kept(out, Kind.GSM8K, subject, settings) as sheet:
            missing = "lm_eval is not installed: pip install 'kimi-k3-gfx942[verify]'"
            sheet.note(rows=[Row(name=_name(dataset is None), state=State.NOT_RUN, evidence=missing)])
        return _told(sheet, report)
    read = None if dataset is None else read_dataset(dataset, SHOTS)
    with api(target) as engine, _directory(out) as directory:
        files = read or _own(directory, limit)
        asked = min(limit or len(files.asked), len(files.asked))
        tokens = _room(files, engine)
        settings |= {"max_gen_toks": tokens, "questions": asked, "evidence": f"gsm8k/{directory.name}"}
        task = str(settings["task"])
        harness.write_task(directory, task, files.reader, files.train, files.test)
        run = Run(directory, directory / SCRATCH, task, engine.model, concurrency, tokens, limit)
        if tokens < harness.ANSWER_TOKENS:
            report(
                f"gsm8k: max_gen_toks {tokens} and not {harness.ANSWER_TOKENS}: "
                "the server's length limit leaves no more"
            )
        report(
            f"gsm8k: {asked} questions ({settings['dataset']}), {concurrency} at a time; "
            f"lm_eval's log is {run.log}"
        )
        with kept(out, Kind.GSM8K, subject, settings) as sheet:
            _ask(run, target, sheet, files, asked, report)
    return _told(sheet, report)


def _ask(
    run: Run, target: Target, sheet: Sheet, files: Dataset, asked: int, report: Callable[[str], None]
) -> None:
    def answered(count: int) -> None:
        sheet.note(figures=[Figure(name="answered", value=count, count=asked)])

    own = run.task == OWN_TASK
    try:
        scores = harness.ask(run, target, answered=answered)
    except (Broken, KeyboardInterrupt):
        count = harness.answers_so_far(run)
        answered(count)
        if count:
            report(f"gsm8k: broken off; lm_eval scores the {count} answers that there are")
            _keep_part(run, sheet, asked, report)
        raise
    expected = published() if files.is_gsm8k and not own else {}
    sheet.note(
        rows=[
            row_of(own, name, score, len(files.asked), expected.get(f"gsm8k-{name}"))
            for name, score in scores.items()
        ],
        figures=[
            _figure(name, score, expected.get(f"gsm8k-{name}") if asked == len(files.asked) else None)
            for name, score in scores.items()
        ],
    )


def _keep_part(run: Run, sheet: Sheet, asked: int, report: Callable[[str], None]) -> None:
    try:
        scores = harness.score_answered(run)
    except Broken as error:
        # What broke the run off is what the operator has to know; the number of answers is kept already.
        report(f"gsm8k: the answers cannot be scored: {error}")
        return
    sheet.note(
        rows=[_part(run.task == OWN_TASK, name, score, asked) for name, score in scores.items()],
        figures=[_figure(name, score, None) for name, score in scores.items()],
    )


def answer_tokens(files: Dataset, engine: Api) -> int:
    """Upstream's 512 tokens for an answer, or what the length limit leaves beside the longest prompt.

    Raises:
        OperatorError: hardly anything is left.
        Broken: the server is gone.
    """
    limit = engine.length_limit()
    prompt = files.longest_prompt(SHOTS)
    # No byte makes more than one token, and the server need not be asked.
    if limit is None or len(prompt.encode()) + PROMPT_MARGIN + harness.ANSWER_TOKENS <= limit:
        return harness.ANSWER_TOKENS
    try:
        length = int(engine.post("/tokenize", {"prompt": prompt})["count"])
    except (Broken, KeyError, TypeError, ValueError):
        # Not every server tells; one that then refuses a prompt says so itself.
        return harness.ANSWER_TOKENS
    left = limit - length - PROMPT_MARGIN
    if left < LEAST_ANSWER_TOKENS:
        raise OperatorError(
            f"the server's length limit is {limit} tokens, and a five-shot prompt may have {length}",
            remedy="start it with a larger --max-model-len",
        )
    return min(harness.ANSWER_TOKENS, left)


def _room(files: Dataset, engine: Api) -> int:
    try:
        return answer_tokens(files, engine)
    except Broken as error:
        raise OperatorError(f"verify gsm8k: {error}", remedy="look at the server's log") from None


def row_of(own: bool, name: str, score: Score, questions: int, expected: Published | None) -> Row:
    """Whether a share of right answers is as it should be.

    GSM8K: at most three standard errors below the published share, or better. The standard error is the
    published one's and that which a share of ``score.count`` questions has if it is truly the published one,
    combined. Our own measured error will not do: with few questions it is large when many answers are wrong
    (and would let 5 of 10 pass), and 0 when all are. The rule holds for the first questions of GSM8K, too;
    with fewer it sees less.

    The miniature's own questions: 95 % right, as it was made for. The share itself is compared and not the
    interval's lower end, by which 50 of 50 would fail; the interval stands beside it.

    Other questions: nobody said how many should be right, so this is not run.

    Args:
        questions: how many there are in the dataset.
        expected: the published figure; ``None`` if there is none for these questions.
    """
    low, high = wilson(score.right, score.count)
    found = f"{score.share:.4f} ({score.right} of {score.count}; 95 % interval {low:.4f} to {high:.4f})"
    if own:
        state = State.PASS if score.share >= OWN_SHARE else State.FAIL
        return Row(name=_name(own, name), state=state, evidence=f"{found}; {OWN_SHARE} or more is wanted")
    if expected is None:
        why = f"not GSM8K, which has {GSM8K_QUESTIONS['train']} and {GSM8K_QUESTIONS['test']} questions"
        return Row(
            name=_name(own, name), state=State.NOT_RUN, evidence=f"{found}; {why}: nothing to compare with"
        )
    least = least_share(expected, score.count)
    state = State.PASS if score.share >= least else State.FAIL
    part = "" if score.count == questions else f" by the first {score.count} of {questions} questions only"
    compared = f"published {expected.value:.4f}, {least:.4f} or more is wanted{part}"
    return Row(name=_name(own, name), state=state, evidence=f"{found}; {compared}")


def least_share(expected: Published, count: int) -> float:
    """The least share of ``count`` questions that agrees with the published one: see :func:`row_of`."""
    here = expected.value * (1 - expected.value) / count
    return expected.value - STANDARD_ERRORS * math.sqrt(here + (expected.standard_error or 0.0) ** 2)


def _part(own: bool, name: str, score: Score, asked: int) -> Row:
    # lm_eval asks the longest prompts first.
    found = f"{score.share:.4f} ({score.right} of {score.count}) of the answered ones"
    evidence = f"broken off: {found}, the longest prompts of {asked}"
    return Row(name=_name(own, name), state=State.NOT_RUN, evidence=evidence)


def _figure(name: str, score: Score, expected: Published | None) -> Figure:
    low, high = wilson(score.right, score.count)
    return Figure(
        name=name,
        value=score.share,
        standard_error=score.error,
        low=low,
        high=high,
        count=score.count,
        published=None if expected is None else expected.value,
        source=None if expected is None else expected.source,
    )


def _own(directory: Path, limit: int | None) -> Dataset:
    examples = held_out_examples(0, OWN_SHOWN + (limit or OWN_ASKED), family="word problem")
    return write_dataset(directory, examples[:OWN_SHOWN], examples[OWN_SHOWN:])


def _name(own: bool, name: str = FILTERS[0]) -> str:
    return f"{'own word problems' if own else 'GSM8K'}, five-shot, {name}"


@contextmanager
def _directory(out: Path) -> Iterator[Path]:
    """A new directory for what this run is given and leaves; what is worth nothing afterwards goes.

    That of runs that were killed goes, too.

    Raises:
        OperatorError: it cannot be made, or takes no file.
    """
    directory = (out / "gsm8k" / datetime.now().strftime("%Y%m%dT%H%M%S.%f")).absolute()
    scratch = directory / SCRATCH
    for left in directory.parent.glob(f"*/{SCRATCH}"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        yield directory
    except NotWritten:
        raise
    except OSError as error:
        raise OperatorError(
            f"--out {out}: cannot write into {directory.relative_to(out.absolute())}: "
            f"{error.strerror or error}",
            remedy="give a writable directory with room for some MB with --out",
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _told(sheet: Sheet, report: Callable[[str], None]) -> State:
    for row in sheet.result.rows:
        report(row.line)
    return sheet.result.state
