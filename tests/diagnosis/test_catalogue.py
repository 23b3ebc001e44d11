# SPDX-License-Identifier: Apache-2.0
"""The catalogue as data: complete, checked, simple to search, and documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kimi_k3.diagnosis.catalogue import Catalogue, Failure, Level, load_catalogue
from kimi_k3.diagnosis.document import failures_document
from kimi_k3.diagnosis.pattern import NotSimple, anchors, gates

from .samples import SURVEY, load_samples

DOCUMENT = Path(__file__).parents[2] / "docs" / "failures.md"
PATTERNS = [
    *(row.pattern for row in load_catalogue().failures if row.pattern),
    *(mark.pattern for mark in load_catalogue().marks.values() if mark.pattern),
]


def test_every_surveyed_failure_is_there() -> None:
    """A number that got lost is a failure that nobody will recognise."""
    assert {number for row in load_catalogue().failures for number in row.covers} == set(SURVEY)


def test_every_row_has_a_sample_or_is_a_symptom() -> None:
    """A pattern nobody tried is a guess."""
    with_signature = {row.name for row in load_catalogue().failures if row.level is not Level.SYMPTOM}
    assert {sample.row for sample in load_samples()} == with_signature


def test_every_surveyed_failure_has_a_sample_or_is_a_symptom() -> None:
    """Rows share numbers, so each number needs lines of its own."""
    symptoms = {number for row in load_catalogue().symptoms for number in row.covers}
    sampled = {sample.number for sample in load_samples()} - {None}
    assert sampled | symptoms == set(SURVEY)
    assert not sampled & symptoms


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_matching_line_holds_an_anchor(pattern: str, data: st.DataObject) -> None:
    """Only lines with an anchor are shown to the pattern; one that is wrong would hide the failure."""
    matching = data.draw(st.from_regex(pattern))
    found = re.search(pattern, matching)
    assert found is not None
    assert any(anchor in found[0] for anchor in anchors(pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+ long enough",
        "(?:a|aa)* long enough",
        "long enough a++",
        "x.*x.*long enough",
        "short",
        "a|long enough",
        "(?=a)long enough",
        r"(long enough) \1",
        "long enough{2,}",
        "^long enough",
        "*long enough",
    ],
)
def test_patterns_that_could_be_slow_are_refused(pattern: str) -> None:
    """One hostile line must not stop a diagnosis, so what could explode cannot even be written down."""
    with pytest.raises(NotSimple):
        anchors(pattern)


def test_anchors_leave_out_what_may_be_missing() -> None:
    """The longest run of fixed characters of each alternative."""
    assert anchors(r"Load format .?kimi.? is not supported|(HIP|CUDA) out of memory") == (
        " is not supported",
        " out of memory",
    )
    assert anchors(r"[Cc]annot select\.*|colou?r of the bikeshed") == ("annot select", "r of the bikeshed")


def test_a_gate_stands_for_the_words_that_hold_it() -> None:
    """What is not in a stretch of log is not in any longer word either."""
    assert gates(["ValueError: ", "Error", "KeyError", "other"]) == {
        "Error": ["Error", "KeyError", "ValueError: "],
        "other": ["other"],
    }


def row(**changes: object) -> dict[str, object]:
    return {
        "name": "a-row",
        "level": "root",
        "pattern": "long enough",
        "phase": None,
        "cause": "a long cause",
        "remedy": "a long remedy",
        "source": "seen",
        "grade": "read",
        **changes,
    }


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"pattern": "long enough("}, "not a regular expression"),
        ({"pattern": "x"}, "fixed characters"),
        ({"cause": ""}, "cause"),
        ({"phase": "load"}, "phase"),
        ({"level": "rot"}, "level"),
        ({"pattern": None}, "every other row has one"),
        ({"level": "symptom"}, "a symptom has no signature"),
        ({"pattrn": "x"}, "did you mean 'pattern'?"),
        ({"remady": "x"}, "did you mean 'remedy'?"),
    ],
)
def test_a_row_is_checked(change: dict[str, object], part: str) -> None:
    """A broken row must not wait for the failure it should explain; a misspelt key names the right one."""
    with pytest.raises(ValidationError) as caught:
        Failure.model_validate(row(**change))
    assert part in str(caught.value)


def test_a_name_is_used_once() -> None:
    """Documents and journals refer to rows by name."""
    with pytest.raises(ValidationError, match="used twice"):
        Catalogue.model_validate({"schema_version": 2, "failures": [row(), row()]})


def test_a_mark_exists() -> None:
    """A condition on a misspelt mark would never hold, or always."""
    data = {
        "schema_version": 2,
        "marks": {"serving": {"pattern": "is serving"}},
        "failures": [row(when=["servin"])],
    }
    with pytest.raises(ValidationError, match="did you mean 'serving'"):
        Catalogue.model_validate(data)


def test_the_document_is_made_from_the_catalogue() -> None:
    """Run ``python -m kimi_k3.diagnosis.document docs/failures.md`` when this fails."""
    assert DOCUMENT.read_text(encoding="utf-8") == failures_document()
    assert all(f"### {failure.name}" in failures_document() for failure in load_catalogue().failures)
