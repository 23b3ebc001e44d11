# SPDX-License-Identifier: Apache-2.0
"""What the kernel's own process tells, and what is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_k3.errors import OperatorError
from kimi_k3.profiles.load import load_profile
from kimi_k3.verify import kernel
from kimi_k3.verify.keeping import read_results
from kimi_k3.verify.kernel import run_kernel
from kimi_k3.verify.results import Result, State
from kimi_k3.verify.target import Target
from kimi_k3.words.backends import Request
from kimi_k3.words.proving import PRODUCTION, REDUCED, Measured, Proven
from tests.ports import free_port

BATCHES = (1, 4)
asked: list[Request] = []


def target() -> Target:
    """Where nobody listens: the kernel needs no start."""
    url = f"http://127.0.0.1:{free_port()}"
    return Target(url, url, url, None, None, None)


def told(*errors: float | None, architecture: str | None = None) -> list[Proven | Measured]:
    """A process's answers, the plain batches first."""
    proven = Proven(
        backend="AITER",
        vllm="0.33.0",
        platform="x",
        architecture=architecture,
        tolerance=0.03,
        batches=BATCHES,
    )
    kinds = [(tokens, signed) for signed in (False, True) for tokens in BATCHES]
    return [
        proven,
        *(
            Measured(tokens=tokens, signed=signed, error=error)
            for (tokens, signed), error in zip(kinds, errors, strict=False)
        ),
    ]


def run(
    out: Path,
    answers: list[Proven | Measured],
    monkeypatch: pytest.MonkeyPatch,
    *,
    profile: str = "ep8",
    reduced: bool | None = None,
) -> Result:
    def ask(request: Request, _: dict[str, str]) -> Iterator[Proven | Measured]:
        asked.append(request)
        yield from answers

    monkeypatch.setattr(kernel, "_ask", ask)
    run_kernel(target(), out, profile=load_profile(profile), reduced=reduced, report=lambda _: None)
    (result,) = read_results(out)
    return result


def test_rounding_passes_and_gfx942_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The production shape is asked for by a profile of GPUs."""
    answers = told(0.004, 0.005, 0.004, 0.005, architecture="gfx942:sramecc+")
    found = run(tmp_path, answers, monkeypatch)
    assert asked[-1] == PRODUCTION
    assert [row.state for row in found.rows] == [State.PASS] * 3
    assert [figure.value for figure in found.figures] == [0.004, 0.005, 0.004, 0.005]
    assert found.settings["top_k"] == 15


def test_a_cpu_proves_nothing_of_gfx942(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran is a reduced layer elsewhere, and the row says so."""
    found = run(tmp_path, told(0.004, 0.005, 0.004, 0.005), monkeypatch, profile="cpu-tiny")
    assert asked[-1] == REDUCED
    assert [row.state for row in found.rows] == [State.PASS, State.PASS, State.NOT_RUN]


@pytest.mark.parametrize("wrong", [0.6, None])
@pytest.mark.parametrize("signed_too", [False, True])
def test_a_wrong_answer_fails_for_the_real_thing_too(
    wrong: float | None, signed_too: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number or none at all, in one batch: no start goes on, and no word of scales excuses it."""
    answers = told(0.004, wrong, 0.004, wrong if signed_too else 0.005, architecture="gfx942")
    found = run(tmp_path, answers, monkeypatch)
    signed = State.FAIL if signed_too else State.PASS
    assert [row.state for row in found.rows] == [State.FAIL, signed, State.FAIL]
    assert not any("without negative scales" in row.evidence for row in found.rows)
    assert found.state is State.FAIL


@pytest.mark.parametrize("wrong", [0.6, None])
def test_wrong_negative_scales_are_told_and_a_start_goes_on(
    wrong: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prove_backend does it: it converts without them; a verification that failed would contradict it."""
    found = run(tmp_path, told(0.004, 0.005, wrong, 0.005, architecture="gfx942"), monkeypatch)
    assert [row.state for row in found.rows] == [State.PASS] * 3
    assert ["without negative scales" in row.evidence for row in found.rows] == [False, True, True]
    assert found.rows[1].evidence.startswith("wrong, ")


def test_a_process_that_ends_early_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an error, after three of four batches: what was measured stays."""
    with pytest.raises(OperatorError, match="ended after 3 batches"):
        run(tmp_path, told(0.004, 0.005, 0.004), monkeypatch)
    (result,) = read_results(tmp_path)
    assert len(result.figures) == 3
    assert result.state is State.FAIL


def test_a_process_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last line, as no vLLM here."""
    monkeypatch.setattr(kernel, "MODULE", "kimi_k3.no_such_module")
    with pytest.raises(OperatorError, match=r"exit code 1: .*no_such_module") as caught:
        run_kernel(target(), tmp_path, profile=load_profile("ep8"), reduced=None, report=lambda _: None)
    assert "\n" not in str(caught.value)


def test_files_beside_the_operator_are_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pydantic.py in the current directory, or a datasets.py, would run in the place of the library."""
    (tmp_path / "pydantic.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernel, "MODULE", "kimi_k3.words.proving")  # It imports that, and says nothing.
    with pytest.raises(OperatorError, match="ended after 0 batches without an error"):
        run_kernel(
            target(), tmp_path / "out", profile=load_profile("ep8"), reduced=None, report=lambda _: None
        )
