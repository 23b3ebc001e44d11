# SPDX-License-Identifier: Apache-2.0
"""What a run against one server keeps, and what several of them tell together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_k3.errors import OperatorError
from kimi_k3.verify import accuracy
from kimi_k3.verify.accuracy import run_accuracy
from kimi_k3.verify.keeping import read_results
from kimi_k3.verify.predictions import SHOTS, digest, questions, read
from kimi_k3.verify.results import Kind, Result, State, Subject
from kimi_k3.verify.target import Target
from kimi_k3.words.weights import ScaleRule, Weights

from .openai_double import Model, serving

COUNT = 10
EXACT = Subject(engine="", model="kimi-k3", weights=Weights.MXFP4)
MSE = Subject(engine="", model="kimi-k3", weights=Weights.INT4, rule=ScaleRule.MSE)
AMAX = Subject(engine="", model="kimi-k3", weights=Weights.INT4, rule=ScaleRule.AMAX)
LOST = "accuracy lost by int4"
RULES = "mse loses less than amax"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(tmp_path, monkeypatch)


class Runner:
    """Asks one model after another, with one directory."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self._patch = out, monkeypatch
        self.lines: list[str] = []

    def __call__(self, model: Model, subject: Subject, *, count: int = COUNT, seed: int = 1) -> Result:
        """One run; the sidecar's word is given."""
        model.learn(seed, count)
        self._patch.setattr(accuracy, "subject_of", lambda _: subject)
        with serving(model):
            target = Target(model.url, None, f"{model.url}/metrics", None, "a-key", None)
            try:
                run_accuracy(target, self.out, count=count, seed=seed, at_a_time=2, report=self.lines.append)
            finally:
                (found,) = read_results(self.out)
        assert found.kind is Kind.ACCURACY
        return found


def row(result: Result, name: str) -> tuple[State, str]:
    (found,) = [row for row in result.rows if row.name.startswith(name)]
    return found.state, found.evidence


def figure(result: Result, name: str) -> float:
    (found,) = [figure for figure in result.figures if figure.name == name]
    return found.value


def test_one_way_to_serve_tells_its_answers_and_what_is_missing(run: Runner) -> None:
    """Nothing is compared with nothing: the rows say what to do, and are no pass."""
    model = Model()
    found = run(model, EXACT)
    assert row(found, "answers held-out questions, mxfp4")[0] is State.PASS
    assert row(found, LOST)[0] is State.NOT_RUN
    assert "--out" in row(found, LOST)[1]
    assert row(found, RULES)[0] is State.NOT_RUN
    assert figure(found, "right answers, mxfp4") == 1
    assert found.ended is not None
    assert model.authorized == {"Bearer a-key"}


def test_wrong_answers_fail(run: Runner) -> None:
    """A model that has lost its wits is found without any comparison."""
    found = run(Model(right=0.5), MSE)
    assert row(found, "answers held-out questions, int4 (mse)")[0] is State.FAIL
    assert found.state is State.FAIL


def test_three_ways_to_serve_are_compared(run: Runner) -> None:
    """Less noise is less divergence; equal answers lose no accuracy."""
    run(Model(), EXACT)
    run(Model(noise=0.1, seed=1), MSE)
    found = run(Model(noise=0.3, seed=2), AMAX)
    assert row(found, "accuracy lost by int4 (mse)")[0] is State.PASS
    assert row(found, RULES)[0] is State.PASS
    less, more = (figure(found, f"KL of answers, int4 ({rule}) from mxfp4") for rule in ("mse", "amax"))
    assert 0 < less < more
    assert figure(found, "KL of answers, mse over amax") == pytest.approx(less / more)
    assert figure(found, "KL of all text, mse over amax") < 1
    assert 0.5 < figure(found, "likeliest token as with mxfp4, int4 (amax)") <= 1
    assert len(found.curves) == 2


def test_a_rule_that_loses_more_fails(run: Runner) -> None:
    """The row is about the rules, not about their names."""
    run(Model(), EXACT)
    run(Model(noise=0.3, seed=1), MSE)
    assert row(run(Model(noise=0.1, seed=2), AMAX), RULES)[0] is State.FAIL


def test_lost_answers_fail(run: Runner) -> None:
    """More than chance explains, question by question."""
    run(Model(), EXACT, count=20)
    found = run(Model(right=0.6), MSE, count=20)
    assert row(found, "accuracy lost by int4 (mse)")[0] is State.FAIL
    assert figure(found, "right answers lost, int4 (mse)") > 0.1


def test_other_questions_are_not_compared(run: Runner) -> None:
    """Predictions of another seed answer something else."""
    run(Model(), EXACT, seed=2)
    found = run(Model(noise=0.1), MSE)
    assert row(found, LOST)[0] is State.NOT_RUN
    assert any("other questions" in line for line in run.lines)


def test_a_server_that_is_gone_leaves_what_was_measured(run: Runner) -> None:
    """One line of an error, the answers so far, and no predictions called whole."""
    with pytest.raises(OperatorError, match=r"verify accuracy: after \d+ of 20 questions: .*gone") as caught:
        run(Model(fails_after=25), MSE, count=20)
    assert "\n" not in str(caught.value)
    (found,) = read_results(run.out)
    assert found.ended is None
    assert found.broken_off is not None
    assert found.state is State.FAIL
    assert 5 <= next(one.count or 0 for one in found.figures) < 20
    warned: list[str] = []
    assert read(run.out, warn=warned.append) == []
    assert "left out" in warned[0]


def test_a_broken_run_does_not_replace_a_whole_one(run: Runner) -> None:
    """The earlier predictions are worth more."""
    run(Model(noise=0.1), MSE)
    with pytest.raises(OperatorError):
        run(Model(fails_after=5), MSE)
    assert [one.whole for one in read(run.out, warn=run.lines.append)] == [True]


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_without_what_is_needed_is_told(run: Runner, status: int) -> None:
    """With its own words, on one line."""
    with pytest.raises(OperatorError, match=f"HTTP {status}"):
        run(Model(status=status), MSE)


def test_a_foreign_file_is_refused_by_its_name(run: Runner) -> None:
    """Not taken for predictions, and not overwritten in silence."""
    run(Model(), EXACT)
    path = next(run.out.glob("predictions-*"))
    path.write_bytes(b"not gzip")
    with pytest.raises(OperatorError, match=path.name):
        run(Model(noise=0.1), MSE)


def test_what_is_asked_is_the_same_for_all() -> None:
    """By its digest; each question has answered ones of its own family before it, never itself."""
    asked = questions(1, 25)
    assert digest(asked) == digest(questions(1, 25))
    assert digest(asked) != digest(questions(2, 25))
    for one in asked:
        assert one.before.count("Question: ") == SHOTS
        assert one.example.question not in one.before
    other = [replace(asked[0], before=""), *asked[1:]]
    assert digest(other) != digest(asked)
