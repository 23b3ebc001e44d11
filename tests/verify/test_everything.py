# SPDX-License-Identifier: Apache-2.0
"""All verifications in turn, and what they say of upstream's checks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kimi_k3.errors import OperatorError
from kimi_k3.profiles.load import load_profile
from kimi_k3.verify import everything
from kimi_k3.verify.everything import run_all
from kimi_k3.verify.keeping import kept
from kimi_k3.verify.results import Kind, Result, Row, State, Subject
from kimi_k3.verify.target import Target
from kimi_k3.verify.validation import CHECKS, Check, validation
from tests.ports import free_port

from .openai_double import Model, serving

MOMENT = datetime(2026, 12, 2, tzinfo=UTC)
SUBJECT = Subject(engine="", profile="cpu-tiny", hardware="2 cores")
NAMES = (
    "graphs",
    "readiness",
    "production shape on gfx942",
    "X against float32, positive scales",
    "accuracy lost by int4 (mse)",
    "answers held-out questions, mxfp4",
    "bench 1/1, concurrency 1",
    "GSM8K, five-shot, strict-match",
    "own word problems, five-shot, strict-match",
)
PARTS = {
    Kind.SMOKE: "_smoke",
    Kind.KERNEL: "run_kernel",
    Kind.ACCURACY: "run_accuracy",
    Kind.GSM8K: "run_gsm8k",
    Kind.LONG: "run_long",
    Kind.BENCH: "run_bench",
}


def result(kind: Kind, *rows: tuple[str, State], broken_off: str | None = None) -> Result:
    return Result(
        kind=kind,
        subject=SUBJECT,
        settings={},
        began=MOMENT,
        broken_off=broken_off,
        rows=tuple(Row(name=name, state=state, evidence="found") for name, state in rows),
    )


def states(*results: Result) -> dict[str, State]:
    return {row.name: row.state for row in validation(results)}


def test_nothing_is_proven_by_nothing() -> None:
    """Without a result every check is not run, and says what to do."""
    rows = validation([])
    assert {row.state for row in rows} == {State.NOT_RUN}
    assert all("kimi-k3" in row.evidence or "cannot" in row.evidence for row in rows)


@pytest.mark.parametrize(
    "one", [check for check in CHECKS if check.kind is not None], ids=lambda check: str(check.name)
)
def test_each_check_is_told_by_its_own_rows(one: Check) -> None:
    """A pass of other rows is no pass of this one, and one failure among passes fails."""
    assert one.kind is not None
    names = [name for name in NAMES if one.rows(name)]
    assert names
    passed = result(one.kind, *((name, State.PASS) for name in names))
    assert states(passed)[one.name] is State.PASS
    mixed = result(one.kind, (names[0], State.FAIL), *((name, State.PASS) for name in names))
    assert states(mixed)[one.name] is State.FAIL
    idle = result(one.kind, (names[0], State.NOT_RUN))
    assert states(idle)[one.name] is State.NOT_RUN
    broken = result(one.kind, (names[0], State.PASS), broken_off="the server is gone")
    assert states(broken)[one.name] is State.FAIL


def test_a_reduced_layer_on_a_cpu_is_no_proof_of_the_production_shape() -> None:
    """What ran is a pass of its own row alone."""
    found = states(
        result(
            Kind.KERNEL,
            ("CPU_INT4 against float32, positive scales", State.PASS),
            ("production shape on gfx942", State.NOT_RUN),
        )
    )
    assert [found[check.name] for check in CHECKS[:2]] == [State.NOT_RUN, State.PASS]


def test_the_miniatures_own_problems_are_not_gsm8k() -> None:
    """A figure that stands for another one would look like what upstream measured."""
    found = states(result(Kind.GSM8K, ("own word problems, five-shot, strict-match", State.PASS)))
    assert found["GSM8K, five-shot"] is State.NOT_RUN
    assert State.PASS in found.values()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """Each verification replaced by one that passes, and a list of those that were made."""
    made: list[Kind] = []

    def replaced(kind: Kind) -> Callable[..., None]:
        def part(_: Target, out: Path, *given: object, **named: object) -> None:
            made.append(kind)
            with kept(out, kind, SUBJECT, {}) as sheet:
                sheet.note(rows=[Row(name="readiness", state=State.PASS, evidence="")])

        return part

    for kind, name in PARTS.items():
        monkeypatch.setattr(everything, name, replaced(kind))
    monkeypatch.setattr(everything, "subject_of", lambda _: SUBJECT)
    return made


def run(
    url: str,
    out: Path,
    profile: str = "cpu-tiny",
    dataset: Path | None = None,
    checkpoint: Path | None = None,
) -> tuple[State, list[str]]:
    lines: list[str] = []
    state = run_all(
        Target(url, None, f"{url}/metrics", None, None, None),
        out,
        profile=load_profile(profile),
        dataset=dataset,
        checkpoint=checkpoint,
        remote_code=False,
        short=None,
        report=lines.append,
    )
    return state, lines


def test_all_are_made_and_the_table_is_printed(tmp_path: Path, parts: list[Kind]) -> None:
    """On a CPU the kernel, too."""
    with serving(Model()) as model:
        state, lines = run(model.url, tmp_path)
    assert sorted(parts) == sorted(Kind)
    assert state is State.PASS
    assert [line for line in lines if line.startswith("not run DSpark")]


def test_one_that_fails_does_not_end_the_others(
    tmp_path: Path, parts: list[Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the server answers; the whole fails."""

    def fails(_: Target, out: Path, **__: object) -> None:
        with kept(out, Kind.LONG, SUBJECT, {}):
            raise OperatorError("verify long: cannot", remedy="do that")

    monkeypatch.setattr(everything, "run_long", fails)
    with serving(Model()) as model:
        state, lines = run(model.url, tmp_path)
    assert Kind.BENCH in parts
    assert "fail: verify long: cannot; do that" in lines
    assert state is State.FAIL


def test_an_earlier_pass_does_not_stand_for_one_that_could_not_begin(
    tmp_path: Path, parts: list[Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is made of what lies in the directory, and yesterday's result lies there, too."""
    with kept(tmp_path, Kind.LONG, SUBJECT, {}) as sheet:
        sheet.note(rows=[Row(name="needle in 4 notes", state=State.PASS, evidence="yesterday")])

    def fails(*_: object, **__: object) -> None:
        raise OperatorError("verify long: 100 tokens are too short", remedy="give more")

    monkeypatch.setattr(everything, "run_long", fails)
    with serving(Model()) as model:
        state, lines = run(model.url, tmp_path)
    assert state is State.FAIL
    assert [line for line in lines if line.startswith("fail    long contexts") and "too short" in line]


@pytest.mark.parametrize("mistyped", ["dataset", "checkpoint"])
def test_what_is_mistyped_is_told_before_anything_is_asked(
    mistyped: str, tmp_path: Path, parts: list[Kind]
) -> None:
    """Each is used by one of the last parts, hours later on a large deployment."""
    with pytest.raises(OperatorError, match="nowhere"):
        run("http://127.0.0.1:1", tmp_path, "cpu-tiny", **{mistyped: tmp_path / "nowhere"})
    assert parts == []


def test_a_server_that_is_gone_ends_it(
    tmp_path: Path, parts: list[Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made before stays; the rest would only say the same."""

    def gone(*_: object, **__: object) -> None:
        raise OperatorError("verify accuracy: the server is gone", remedy="look")

    monkeypatch.setattr(everything, "run_accuracy", gone)
    with pytest.raises(OperatorError, match="the API at"):
        run(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert parts == [Kind.SMOKE]
    assert (tmp_path / "smoke.json").exists()


def test_another_profile_is_refused(tmp_path: Path, parts: list[Kind]) -> None:
    """Its results would stand under a wrong name."""
    with pytest.raises(OperatorError, match="serves profile cpu-tiny, and ep8 was asked for"):
        run("http://127.0.0.1:1", tmp_path, profile="ep8")
    assert parts == []
