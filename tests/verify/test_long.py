# SPDX-License-Identifier: Apache-2.0
"""verify long: where codes are put, what counts as found, how lengths grow, and what is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kimi_k3.cli.application import run
from kimi_k3.errors import OperatorError
from kimi_k3.verify.keeping import read_results
from kimi_k3.verify.long import (
    ANSWER_TOKENS,
    DEPTHS,
    Asked,
    Length,
    context,
    curves_of,
    is_found,
    next_notes,
    question,
    row_of,
    run_long,
)
from kimi_k3.verify.questions import Example, final_answer, is_held_out, needle, placed_needle
from kimi_k3.verify.results import Result, State
from tests.verify.openai_server import Server, running

TOKENS_PER_NOTE = 12
EXAMPLE = Example("needle", "", "The code of the red box is 0417.\n#### 0417")


def length(notes: int, right: int, count: int, tokens: int) -> Length:
    names = list(DEPTHS)
    asked = tuple(Asked(names[n % len(names)], n < right, tokens, "I do not know") for n in range(count))
    return Length(notes, asked, count)


@pytest.mark.parametrize("notes", [1, 2, 7, 60, 182, 183, 1000])
@pytest.mark.parametrize("depth", [0, 0.5, 1])
def test_the_code_stands_where_it_is_put(notes: int, depth: float) -> None:
    """A place left to chance would say nothing of places; and no other sentence may answer the question."""
    example = placed_needle(Random(notes), notes=notes, depth=depth)
    sentences = re.findall(r"[^.?]+[.?]", example.question)
    assert len(sentences) == notes + 1
    (asked,) = re.findall(r"What is the code of the ([a-z]+ [a-z]+(?: \d+)?)\?", example.question)
    sentence = f"The code of the {asked} is {final_answer(example.answer)}."
    assert [n for n, text in enumerate(sentences) if f"the {asked} is" in text] == [
        round(depth * (notes - 1))
    ]
    assert sentences[round(depth * (notes - 1))].strip() == sentence


def test_many_notes_have_many_codes() -> None:
    """There are 182 plain names: a long text of names that ran out would hide its code among walks."""
    text = needle(Random(0), notes=4000).question
    holders = re.findall(r"The code of the ([a-z]+ [a-z]+ \d+) is \d{4}\.", text)
    assert len(holders) == len(set(holders))
    assert 2800 < len(holders) < 3200


def test_questions_are_held_out_and_differ() -> None:
    """What the miniature was trained on would be remembered; and the same seed must ask the same again."""
    asked = [question(0, 8, number) for number in range(12)]
    assert asked == [question(0, 8, number) for number in range(12)]
    assert len({example.question for _, example in asked}) == 12
    assert all(is_held_out(example.question) for _, example in asked)
    assert [depth for depth, _ in asked[:4]] == ["beginning", "middle", "end", "beginning"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The code of the red box is 0417.\n#### 0417", True),
        ("The code is **0417**.", True),
        ("0417", True),
        ("It is 0417.\n#### 0418", False),
        ("#### 9\nSo:\n#### 0417", True),
        ("It is 10417.", False),
        ("It is 417.", False),
        ("The red box has 0417, the blue jar 1234.", False),
        ("", False),
    ],
)
def test_what_counts_as_found(text: str, found: bool) -> None:
    """A wrong answer that happens to hold the code's digits, or holds all codes, must not count."""
    assert is_found(EXAMPLE, text) is found


@pytest.mark.parametrize("room", [200, 384, 896, 5000, 130_944, 1_048_448])
def test_lengths_double_and_fill_the_context(room: int) -> None:
    """None may be longer than the server takes, and the last must be near its end."""
    measured = [length(4, 6, 6, 30 + 4 * TOKENS_PER_NOTE)]
    while (notes := next_notes(measured, room)) is not None:
        assert notes <= 2 * measured[-1].notes
        measured.append(length(notes, 6, 6, 30 + notes * TOKENS_PER_NOTE))
    assert room / 1.4 < measured[-1].most_tokens <= room


@pytest.mark.parametrize(
    ("right", "count", "state"),
    [(6, 6, "pass"), (5, 6, "fail"), (19, 20, "pass"), (18, 20, "pass"), (17, 20, "fail"), (90, 100, "fail")],
)
def test_when_a_length_passes(right: int, count: int, state: str) -> None:
    """The two halves of the rule: a share seen, and a share that the interval still allows."""
    row = row_of(length(8, right, count, 100))
    assert row.state == state
    assert row.evidence.startswith(f"{right}/{count} codes found")
    assert ("a wrong answer" in row.evidence) is (right < count)


def test_curves() -> None:
    """The share is drawn over tokens, and over the place of all lengths together."""
    found, lower, places = curves_of([length(4, 6, 6, 80), length(8, 3, 6, 130)])
    assert (found.x, found.y) == ((80, 130), (1, 0.5))
    assert lower.plot == found.plot
    assert all(low < share for low, share in zip(lower.y, found.y, strict=True))
    assert (places.x, places.y) == ((0, 0.5, 1), (0.75, 0.75, 0.75))


@pytest.mark.parametrize(
    ("limit", "up_to", "said"),
    [
        (1024, 2048, "takes 1024"),
        (None, None, "does not tell"),
        (100, None, "too short"),
        (1024, 9, "too short"),
    ],
)
def test_contexts_that_do_not_do(limit: int | None, up_to: int | None, said: str) -> None:
    """Known before anything is asked, and said with what to do."""
    with pytest.raises(OperatorError, match=said):
        context(limit, up_to)


def completion(text: str | None, tokens: int) -> tuple[int, str]:
    answer = {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": tokens}}
    return 200, json.dumps(answer)


def read(body: dict[str, Any]) -> tuple[int, str]:
    """What an attentive model answers."""
    text = body["messages"][0]["content"]
    asked = text.rpartition("What is the code of the ")[2].rstrip("?")
    code = re.search(rf"The code of the {asked} is (\d+)", text).group(1)  # type: ignore[union-attr]
    return completion(f"#### {code}", 30 + TOKENS_PER_NOTE * text.count(". "))


def kept_in(out: Path) -> Result:
    (result,) = read_results(out)
    return result


def looked(server: Server, out: Path, **changes: Any) -> tuple[State, list[str]]:
    told: list[str] = []
    given: dict[str, Any] = {"up_to": None, "each": 3, "seed": 0} | changes
    return run_long(server.target, out, report=told.append, **given), told


def test_all_found(tmp_path: Path) -> None:
    """A line for each length, and the same in the file; asked as in a chat, greedily, without thinking."""
    with running(Server(read)) as server:
        state, told = looked(server, tmp_path)
    result = kept_in(tmp_path)
    assert (state, result.state, result.broken_off) == (State.PASS, State.PASS, None)
    assert [row.name for row in result.rows] == [f"needle in {n} notes" for n in (4, 8, 16, 32, 64)]
    assert told == [f"pass    {row.name}: {row.evidence}" for row in result.rows]
    assert [figure.value for figure in result.figures] == [1] * 5
    body = server.asked[0]
    assert (body["temperature"], body["max_tokens"]) == (0, ANSWER_TOKENS)
    assert body["chat_template_kwargs"] == {"thinking": False}


@pytest.mark.parametrize("text", ["The code is 12.", None, "#### 99999"])
def test_nothing_found(tmp_path: Path, text: str | None) -> None:
    """A model that answers nonsense fails every length, and the file shows an answer."""
    with running(
        Server(lambda body: completion(text, 30 + len(body["messages"][0]["content"]) // 4))
    ) as server:
        state, told = looked(server, tmp_path, up_to=400)
    assert state is kept_in(tmp_path).state is State.FAIL
    assert all(line.startswith("fail ") and "0/3 codes found" in line for line in told)
    assert f"a wrong answer (beginning): {text or 'nothing'}" in told[0]


BROKEN: dict[str, tuple[tuple[int, str] | None, str]] = {
    "gone": (None, "the server is gone"),
    "an error": ((500, '{"error": "out of\nmemory"}'), "HTTP 500: "),
    "no JSON": ((200, "<html>"), "no JSON: <html>"),
    "something else": ((200, '["hello"]'), "no chat completion: ['hello']"),
    "no usage": ((200, '{"choices": [{"message": {"content": "a"}}]}'), "no chat completion"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_off(tmp_path: Path, case: str) -> None:
    """What was measured stays, also of the length under way; the error is one line that names the file."""
    answer, said = BROKEN[case]

    def one_length(body: dict[str, Any]) -> tuple[int, str] | None:
        return read(body) if len(server.asked) <= 4 else answer

    with running(Server(one_length)) as server, pytest.raises(OperatorError) as caught:
        looked(server, tmp_path)
    result = kept_in(tmp_path)
    assert [row.state for row in result.rows] == [State.PASS, State.NOT_RUN]
    assert result.rows[1].evidence.startswith("partial, 1 of 3 questions; 1/1 codes found")
    assert [figure.count for figure in result.figures] == [3, 1]
    assert (result.state, result.ended) == (State.FAIL, None)
    assert said in (result.broken_off or "")
    assert said in str(caught.value)
    assert str(tmp_path / "long.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The options reach the run."""
    with running(Server(read)) as server:
        code = run(
            [
                *("verify", "long", "--engine", server.url, "--no-sidecar", "--out", str(tmp_path)),
                *("--up-to", "300", "--each", "2", "--seed", "5"),
            ]
        )
    assert code == 0
    assert capsys.readouterr().out.count("2/2 codes found") == 3
    settings = kept_in(tmp_path).settings
    assert (settings["up to"], settings["each"], settings["seed"]) == (300, 2, 5)
