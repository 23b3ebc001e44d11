# SPDX-License-Identifier: Apache-2.0
"""The report says what was measured, with what, and what was not."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kimi_k3.cli.application import run
from kimi_k3.verify.keeping import Broken, kept, read_results
from kimi_k3.verify.report import FILES, rendered, write_report
from kimi_k3.verify.results import Curve, Figure, Kind, Result, Row, State, Subject
from kimi_k3.verify.validation import CHECKS
from kimi_k3.words.weights import ScaleRule, Weights

MOMENT = datetime(2026, 12, 2, 12, tzinfo=UTC)
SUBJECT = Subject(
    engine="http://127.0.0.1:8000",
    model="kimi-k3",
    profile="tp8",
    weights=Weights.INT4,
    rule=ScaleRule.MSE,
    hardware="8 x gfx942 (MI325X)",
    versions={"vllm": "0.33.0"},
)
ACCURACY = Result(
    kind=Kind.ACCURACY,
    subject=SUBJECT,
    settings={"count": 100, "limit": None},
    began=MOMENT,
    ended=MOMENT.replace(minute=2),
    rows=(Row(name="answers | held out", state=State.PASS, evidence="100 of 100 <right>"),),
    figures=(
        Figure(
            name="KL", value=8.0172e-8, unit="nats", standard_error=1e-9, low=5e-8, high=1.1e-7, count=100
        ),
        Figure(name="strict-match", value=0.95981, published=0.9598, source="vllm#51274"),
    ),
    curves=(
        Curve(plot="share by length", name="6 each", x_label="tokens", y_label="share", x=(1, 2), y=(1, 0.5)),
    ),
)


@pytest.mark.parametrize("name", FILES)
def test_it_names_what_was_measured_and_what_was_not(name: str) -> None:
    """Model, weights, rule, profile, versions and hardware; each kind that nobody ran is listed as such."""
    text = rendered([ACCURACY], name, MOMENT)
    for told in ("kimi-k3", "int4 (mse)", "tp8", "vllm 0.33.0", "8 x gfx942 (MI325X)", "120 s", "count 100"):
        assert told in text
    for told in ("8.017e-08 nats", "5.000e-08 to 1.100e-07", "0.9598", "vllm#51274"):
        assert told in text
    assert "limit" not in text, "a setting that nobody gave"
    assert len(re.findall(r"[>|] ?not run ?[<|]", text)) == len(Kind) - 1 + len(CHECKS)


def test_foreign_text_is_text() -> None:
    """A model's answer or a server's error may hold markup."""
    page, table = (rendered([ACCURACY], name, MOMENT) for name in FILES)
    assert "<right>" not in page
    assert "&lt;right&gt;" in page
    assert r"answers \| held out" in table
    (row,) = [line for line in table.splitlines() if "held out" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 4


def test_plots_are_in_the_page_itself() -> None:
    """It is sent by mail and opened without a network; made twice it is the same."""
    page = rendered([ACCURACY], FILES[0], MOMENT)
    assert page.count("<svg") == 1
    assert "share by length" in page
    for outside in ("<script", "<link", "src=", "@import"):
        assert outside not in page
    assert rendered([ACCURACY], FILES[0], MOMENT) == page


def test_without_matplotlib_there_are_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that serves has jinja2, by vLLM, and no matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "kimi_k3.verify.plots", raising=False)
    page = rendered([ACCURACY], FILES[0], MOMENT)
    assert "<svg" not in page
    assert "8.017e-08 nats" in page


def test_a_run_that_was_broken_off_says_so_first(tmp_path: Path) -> None:
    """Its figures are true and may still mislead."""
    with pytest.raises(Exception, match="gone"), kept(tmp_path, Kind.LONG, SUBJECT, {}):
        raise Broken("after 3 of 9 lengths: the server is gone")
    (result,) = read_results(tmp_path)
    for name in FILES:
        assert "Broken off: after 3 of 9 lengths" in rendered([result], name, MOMENT)
    unfinished = ACCURACY.model_copy(update={"ended": None})
    assert "Not ended" in rendered([unfinished], FILES[1], MOMENT)


def test_the_command_makes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a directory of results; an empty one is told what to do."""
    assert run(["verify", "report", "--out", str(tmp_path)]) == 1
    assert "holds no result" in capsys.readouterr().err
    with kept(tmp_path, Kind.BENCH, SUBJECT, {"prompts": 10}) as sheet:
        sheet.note(rows=[Row(name="10/10", state=State.PASS, evidence="no error")])
    assert run(["verify", "report", "--out", str(tmp_path)]) == 0
    for name in FILES:
        assert "no error" in (tmp_path / name).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", *sorted(FILES)]


def test_a_foreign_result_is_refused(tmp_path: Path) -> None:
    """Its name and what is wrong, on one line."""
    (tmp_path / "long.json").write_text('{"kind": "long"}')
    with pytest.raises(Exception, match=r"long\.json: is no result of this version: subject") as caught:
        write_report(tmp_path, MOMENT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (1.0000034, 2.4e-6, "1.0000034"),
        (1.0000051, 2.4e-6, "1.0000051"),
        (1.0000034, None, "1.000"),
        (0.9598, 0.0054, "0.9598"),
        (0.95, 0.0, "0.9500"),
        (3.1e-8, 0.4e-8, "3.100e-08"),
        (24.051, 1e-300, "24.051000000000"),
        (12.0, None, "12"),
        (1.0, 2.4e-6, "1"),
        (0.0, None, "0"),
    ],
)
def test_digits(value: float, error: float | None, shown: str) -> None:
    """Perplexities of good answers differ in the sixth digit: those that are surely measured are shown."""
    figure = Figure(name="perplexity", value=value, standard_error=error)
    result = ACCURACY.model_copy(update={"figures": (figure,)})
    table = rendered([result], FILES[1], MOMENT)
    assert f"| perplexity | {shown}  |" in table
