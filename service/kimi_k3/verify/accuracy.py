# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 verify accuracy``: what a lossy conversion costs, on the same questions to each way to serve.

One run asks one server and keeps what it predicts; a run against another server with the same directory
compares all that is there. On gfx942 the exact weights cannot be served, so their predictions come from
another machine: it is the file that has to be in the directory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count as counting
from pathlib import Path
from statistics import fmean, median

from kimi_k3.verify.asking import api, subject_of
from kimi_k3.verify.divergence import divergence, top_token
from kimi_k3.verify.keeping import Broken, Sheet, kept
from kimi_k3.verify.predictions import (
    SHOTS,
    Position,
    Predicted,
    Predictions,
    digest,
    file_name,
    predict,
    questions,
    read,
    write,
)
from kimi_k3.verify.results import Curve, Figure, Kind, Row, State
from kimi_k3.verify.statistics import bootstrap, mean_and_error, share_error, wilson
from kimi_k3.verify.target import Target
from kimi_k3.words.weights import ScaleRule, Weights

RIGHT = 0.95
"""Share of right answers below which something is broken: the miniature was taught these questions, and for a
large model they are easy."""

CHUNK = 10
"""Questions after which what was predicted is kept."""


@dataclass(frozen=True)
class Loss:
    """How one question's predictions differ from those of the exact weights.

    Attributes:
        answer, question, all: mean KL(exact || other) over positions, nats.
        top: share of all positions with the same likeliest token.
        perplexity: difference of the answer's mean loss a token, nats.
        right: 1, 0 or -1: whether only the exact one, both or neither, or only the other is right.
    """

    answer: float
    question: float
    all: float
    top: float
    perplexity: float
    right: int


def run_accuracy(
    target: Target, out: Path, *, count: int, seed: int, at_a_time: int, report: Callable[[str], None]
) -> State:
    """Ask the deployment, keep what it predicts, and compare all that is kept in ``out``.

    Args:
        count: of questions.
        seed: of the questions.
        at_a_time: requests.

    Raises:
        OperatorError: the deployment cannot be asked, or was gone before the end.
    """
    subject = subject_of(target)
    read(out, warn=lambda _: None)  # What cannot be compared is known before anything is asked.
    settings = {"count": count, "seed": seed, "shots": SHOTS, "at_a_time": at_a_time}
    asked = questions(seed, count)
    with api(target) as engine, kept(out, Kind.ACCURACY, subject, settings) as sheet:
        predictions = Predictions(
            subject=subject, seed=seed, count=count, shots=SHOTS, asked=digest(asked), predicted=()
        )
        report(
            f"{subject.served_as} at {target.engine}: {count} questions, {SHOTS} answered ones before each"
        )
        found: list[Predicted] = []
        try:
            for number, one in zip(counting(1), predict(engine, asked, at_a_time=at_a_time), strict=False):
                found.append(one)
                if number % CHUNK == 0:
                    sheet.note(figures=_of_one(predictions.model_copy(update={"predicted": tuple(found)})))
                    report(f"{number} of {count}: {sum(each.right for each in found)} right")
        except Broken as error:
            raise Broken(f"after {len(found)} of {count} questions: {error}") from None
        finally:
            _keep(sheet, out, predictions, found, report)
        for row in sheet.result.rows:
            report(row.line)
    return sheet.result.state


def _keep(
    sheet: Sheet,
    out: Path,
    predictions: Predictions,
    found: Sequence[Predicted],
    report: Callable[[str], None],
) -> None:
    """Keep what was predicted, and what the comparison with all other predictions gives."""
    if not found:
        return
    mine = predictions.model_copy(update={"predicted": tuple(found)})
    if mine.whole or not (out / file_name(mine.subject)).exists():
        write(out, mine)
    others = [one for one in read(out, warn=report) if file_name(one.subject) != file_name(mine.subject)]
    same = [one for one in others if one.asked == mine.asked]
    for one in others:
        if one not in same:
            report(f"{file_name(one.subject)} answers other questions: not compared")
    rows, figures, curves = compared([mine, *same] if mine.whole else [mine])
    sheet.note(rows=rows, figures=figures, curves=curves)


def compared(all_of_them: Sequence[Predictions]) -> tuple[list[Row], list[Figure], list[Curve]]:
    """What several ways to serve make of the same questions; pure.

    Args:
        all_of_them: the first one is that of this run.
    """
    ordered = sorted(all_of_them, key=lambda one: file_name(one.subject))
    figures = [figure for one in ordered for figure in _of_one(one)]
    rows = [_answers(one) for one in ordered]
    exact = next((one for one in ordered if one.subject.weights is Weights.MXFP4), None)
    lossy = [one for one in ordered if one.subject.weights is Weights.INT4]
    curves: list[Curve] = []
    losses: dict[ScaleRule | None, list[Loss]] = {}
    for other in lossy:
        if exact is None:
            continue
        losses[other.subject.rule] = loss = [
            _loss(first, second) for first, second in zip(exact.predicted, other.predicted, strict=True)
        ]
        figures += _of_loss(other.subject.served_as, loss)
        rows.append(_accuracy_lost(other.subject.served_as, loss))
        curves.append(_distribution(other.subject.served_as, loss))
    if exact is None or not lossy:
        missing = "the exact weights" if exact is None else "int4"
        why = f"no predictions of {missing} for these questions"
        rows.append(Row(name="accuracy lost by int4", state=State.NOT_RUN, evidence=f"{why}; {_HOW}"))
    rows.append(_rules(losses.get(ScaleRule.MSE), losses.get(ScaleRule.AMAX), figures))
    return rows, figures, curves


_HOW = "ask a server of them with the same --out, --count and --seed, or put its predictions-*.json.gz there"


def _of_one(one: Predictions) -> list[Figure]:
    """Accuracy and perplexity of one way to serve."""
    if not one.predicted:
        return []
    name, total = one.subject.served_as, len(one.predicted)
    right = sum(each.right for each in one.predicted)
    low, high = wilson(right, total)
    losses = [fmean(position.loss for position in _answer(each)) for each in one.predicted]
    loss, error = mean_and_error(losses)
    return [
        Figure(
            name=f"right answers, {name}",
            value=right / total,
            standard_error=share_error(right, total),
            low=low,
            high=high,
            count=total,
        ),
        Figure(
            name=f"perplexity of answers, {name}",
            value=math.exp(loss),
            standard_error=None if error is None else math.exp(loss) * error,
            count=total,
        ),
    ]


def _answers(one: Predictions) -> Row:
    """Fails only where chance does not explain it: the interval's upper end is below the bar."""
    right, total = sum(each.right for each in one.predicted), len(one.predicted)
    enough = wilson(right, total)[1] >= RIGHT
    return Row(
        name=f"answers held-out questions, {one.subject.served_as}",
        state=State.PASS if enough else State.FAIL,
        evidence=f"{right} of {total} right; {RIGHT:.0%} are expected",
    )


def _loss(exact: Predicted, other: Predicted) -> Loss:
    pairs = list(zip(exact.positions, other.positions, strict=True))
    each = [divergence(first.likeliest, second.likeliest) for first, second in pairs]
    begin = exact.positions_of_question
    return Loss(
        answer=fmean(each[begin:]),
        question=fmean(each[:begin]),
        all=fmean(each),
        top=fmean(top_token(first.likeliest) == top_token(second.likeliest) for first, second in pairs),
        perplexity=_mean_loss(_answer(other)) - _mean_loss(_answer(exact)),
        right=int(exact.right) - int(other.right),
    )


def _answer(one: Predicted) -> tuple[Position, ...]:
    return one.positions[one.positions_of_question :]


def _mean_loss(positions: Sequence[Position]) -> float:
    return fmean(position.loss for position in positions)


def _of_loss(name: str, losses: Sequence[Loss]) -> list[Figure]:
    """Means over questions with their standard errors, and paired bootstrap intervals."""
    wanted: list[tuple[str, str, Callable[[Loss], float]]] = [
        (f"KL of answers, {name} from mxfp4", "nats a token", lambda loss: loss.answer),
        (f"KL of questions, {name} from mxfp4", "nats a token", lambda loss: loss.question),
        (f"KL of all text, {name} from mxfp4", "nats a token", lambda loss: loss.all),
        (f"likeliest token as with mxfp4, {name}", "", lambda loss: loss.top),
        (f"loss of answers more than with mxfp4, {name}", "nats a token", lambda loss: loss.perplexity),
        (f"right answers lost, {name}", "", lambda loss: float(loss.right)),
    ]
    figures = []
    for title, unit, pick in wanted:
        values = [pick(loss) for loss in losses]
        mean, error = mean_and_error(values)
        low, high = bootstrap(_mean_of(values), len(values))
        figures.append(
            Figure(
                name=title,
                value=mean,
                unit=unit,
                standard_error=error,
                low=low,
                high=high,
                count=len(values),
            )
        )
    return figures


def _mean_of(values: Sequence[float]) -> Callable[[Sequence[int]], float]:
    return lambda drawn: fmean(values[number] for number in drawn)


def _accuracy_lost(name: str, losses: Sequence[Loss]) -> Row:
    """Fails if the paired interval of the right answers that were lost lies above zero."""
    lost = [loss.right for loss in losses]
    low, high = bootstrap(_mean_of(lost), len(lost))
    return Row(
        name=f"accuracy lost by {name}",
        state=State.FAIL if low > 0 else State.PASS,
        evidence=f"{fmean(lost):.2%} of {len(lost)} questions "
        f"(95 %: {low:.2%} to {high:.2%}, paired bootstrap)",
    )


def _rules(mse: Sequence[Loss] | None, amax: Sequence[Loss] | None, figures: list[Figure]) -> Row:
    """Whether mse loses less than amax: fails if its divergence over that of amax is above one for sure."""
    name = "mse loses less than amax"
    if mse is None or amax is None:
        missing = " and ".join(rule for rule, losses in (("mse", mse), ("amax", amax)) if losses is None)
        return Row(
            name=name, state=State.NOT_RUN, evidence=f"no predictions of int4 ({missing}) to compare; {_HOW}"
        )
    told = []
    parts = {
        "answers": ([loss.answer for loss in mse], [loss.answer for loss in amax]),
        "all text": ([loss.all for loss in mse], [loss.all for loss in amax]),
    }
    for part, (first, second) in parts.items():
        ratio = _ratio_of(first, second)
        value = ratio(range(len(first)))
        if math.isnan(value):
            continue
        low, high = bootstrap(ratio, len(first))
        title = f"KL of {part}, mse over amax"
        figures.append(Figure(name=title, value=value, low=low, high=high, count=len(first)))
        told.append((part, value, low, high))
    if not told:
        return Row(name=name, state=State.NOT_RUN, evidence="amax changes nothing that these questions show")
    return Row(
        name=name,
        state=State.FAIL if any(low > 1 for _, _, low, _ in told) else State.PASS,
        evidence="; ".join(
            f"KL of {part}: {value:.2f} of amax's (95 %: {low:.2f} to {high:.2f})"
            for part, value, low, high in told
        ),
    )


def _ratio_of(above: Sequence[float], below: Sequence[float]) -> Callable[[Sequence[int]], float]:
    def ratio(drawn: Sequence[int]) -> float:
        total = math.fsum(below[number] for number in drawn)
        return math.fsum(above[number] for number in drawn) / total if total else math.nan

    return ratio


def _distribution(name: str, losses: Sequence[Loss]) -> Curve:
    """The questions' divergences in order of size: whether a few carry the mean."""
    values = sorted(loss.all for loss in losses)
    return Curve(
        plot="KL from the exact weights, question by question",
        name=f"{name}, median {median(values):.1e}",
        x_label="share of questions",
        y_label="nats a token",
        logarithmic=True,
        x=tuple((rank + 0.5) / len(values) for rank in range(len(values))),
        y=tuple(max(value, 1e-12) for value in values),
    )
