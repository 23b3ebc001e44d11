# SPDX-License-Identifier: Apache-2.0
"""The miniature's questions: right, endless, apart from the training's, and read as they are served."""

from __future__ import annotations

import re
from datetime import date, timedelta
from fractions import Fraction
from itertools import islice
from random import Random

import pytest
from examples.miniature import task, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kimi_k3.checkpoint.tiny_files import CHAT_TEMPLATE
from kimi_k3.verify import questions

SEEDS = st.integers(0, 2**32)
FAMILIES = st.sampled_from(list(questions.FAMILIES))


@pytest.fixture(scope="module")
def merges() -> list[tuple[str, str]]:
    """The merges that training would learn."""
    return vocabulary.learn_merges()


@settings(deadline=None)
@given(SEEDS, FAMILIES, st.booleans())
def test_a_question_is_in_one_part_only(seed: int, family: str, held_out: bool) -> None:
    """Accuracy on held-out questions means nothing if training has seen one of them."""
    example = questions.draw(Random(seed), family, held_out=held_out, notes=8)
    assert questions.is_held_out(example.question) is held_out
    assert questions.is_correct(example, example.answer)
    assert not questions.is_correct(example, example.answer + "0")


@settings(deadline=None)
@given(SEEDS)
def test_training_asks_nothing_held_out(seed: int) -> None:
    """Training draws through another function than evaluation, in chats and in few-shot examples."""
    text = "".join(piece for piece, _ in islice(task.training_text(Random(seed), notes=8), 24))
    asked = re.findall(r'role="user"<\|sep\|>(.*?)<\|close\|>', text) + re.findall(
        r"Question: (.*?)\nAnswer:", text
    )
    assert len(asked) == 12
    assert not [q for q in asked if questions.is_held_out(q) and q not in task.OTHER_QUESTIONS]


@settings(deadline=None)
@given(SEEDS)
def test_word_problems_add_up(seed: int) -> None:
    """Every line of the working is true, each goes on from an earlier one, and the last is the result."""
    example = questions.word_problem(Random(seed))
    told = {int(n) for n in re.findall(r"\d+", example.question)}
    *lines, last = example.answer.splitlines()
    result = 0
    for line in lines:
        left, operator, right, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", line).groups()  # type: ignore[union-attr, assignment]
        a, b, result = int(left), int(right), int(result)
        assert {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b)}[operator] == result
        assert {a, b} <= told
        told.add(result)
    assert last == f"#### {result}"


@settings(deadline=None)
@given(SEEDS)
def test_weekdays_agree_with_the_calendar(seed: int) -> None:
    """Python's own calendar is the second opinion."""
    example = questions.weekday(Random(seed))
    today, days = re.search(r"Today is (\w+)\..* (\d+) days", example.question).groups()  # type: ignore[union-attr]
    monday = date(2024, 1, 1)
    shift = int(days) * (-1 if "ago" in example.question else 1)
    then = monday + timedelta(days=questions.DAYS.index(today) + shift)
    assert questions.final_answer(example.answer) == questions.DAYS[then.weekday()]


@settings(deadline=None)
@given(SEEDS)
def test_dates_agree_with_the_calendar(seed: int) -> None:
    """As above, in a year that has no leap day."""
    example = questions.date(Random(seed))
    days, day, month = re.search(r"(\d+) days after (\d+) (\w+)", example.question).groups()  # type: ignore[union-attr]
    names = [name for name, _ in questions.MONTHS]
    then = date(2025, names.index(month) + 1, int(day)) + timedelta(days=int(days))
    assert questions.final_answer(example.answer) == f"{then.day} {names[then.month - 1]}"


@settings(deadline=None)
@given(SEEDS, st.integers(1, 250))
def test_the_asked_code_stands_in_the_notes(seed: int, notes: int) -> None:
    """A needle must be there, once: two codes for one box would make the answer a guess."""
    example = questions.needle(Random(seed), notes=notes)
    asked = re.search(r"What is the code of the ([\w ]+)\?", example.question).group(1)  # type: ignore[union-attr]
    codes = re.findall(rf"The code of the {asked} is (\d{{4}})\.", example.question)
    assert codes == [questions.final_answer(example.answer)]
    assert example.question.count(". ") == notes


@settings(deadline=None)
@given(SEEDS)
def test_sorting_sorts(seed: int) -> None:
    """The two directions are easily swapped."""
    example = questions.sorting(Random(seed))
    numbers = [int(n) for n in re.findall(r"\d+", example.question)]
    expected = sorted(numbers, reverse="largest to smallest" in example.question)
    assert questions.final_answer(example.answer) == ", ".join(map(str, expected))


def test_a_family_that_runs_out_says_so() -> None:
    """Only so many weekday questions exist; a search for one more must end. One that did not cost an hour."""
    assert len({e.question for e in questions.held_out_examples(0, 1500)}) == 1500
    with pytest.raises(ValueError, match="weekday has no more"):
        questions.held_out_examples(0, 400, family="weekday")


def test_lm_eval_reads_the_answers() -> None:
    """GSM8K's own pattern in lm_eval's ``strict-match`` must find the result of a word problem."""
    for example in questions.held_out_examples(2, 50, family="word problem"):
        found = re.findall(r"#### (\-?[0-9\.\,]+)", example.answer)
        assert found == [questions.final_answer(example.answer)]


@pytest.mark.parametrize("turns", [1, 3])
def test_training_sees_what_the_chat_template_writes(turns: int) -> None:
    """The template is the server's, the segments are the training's; apart by a byte, it is another task."""
    examples = questions.held_out_examples(3, turns)
    messages = []
    for example in examples:
        messages += [
            {"role": "user", "content": example.question},
            {"role": "assistant", "content": example.answer},
        ]
    template = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    trained = "".join(text for example in examples for text, _ in task.chat_turn(example))
    assert template.render(messages=messages) == trained
    asked = template.render(messages=messages[:-1], add_generation_prompt=True)
    assert trained.startswith(asked)
    assert asked.endswith(task.chat_prompt(examples[-1].question))


def test_segments_have_the_tokens_of_the_whole(merges: list[tuple[str, str]]) -> None:
    """Training reads text piece by piece, a server reads it whole: the tokens must be the same."""
    tokenizer = vocabulary.build(merges)
    for seed in range(60):
        segments = [text for text, _ in islice(task.training_text(Random(seed), notes=8), 10)]
        pieces = [number for text in segments for number in tokenizer.encode(text).ids]
        assert pieces == tokenizer.encode("".join(segments)).ids
        assert tokenizer.decode(pieces, skip_special_tokens=False) == "".join(segments)


def test_vocabulary_is_as_the_format_wants_it(merges: list[tuple[str, str]]) -> None:
    """Bytes first, special tokens last, digits alone; any text comes back as it was."""
    tokenizer = vocabulary.build(merges)
    assert tokenizer.get_vocab_size() == vocabulary.VOCAB_SIZE
    assert tokenizer.encode("A").ids == [65]
    assert tokenizer.encode("1234").tokens == list("1234")
    assert tokenizer.token_to_id("[PAD]") == vocabulary.PAD
    assert merges == vocabulary.learn_merges()
    text = "Grüße, 12 пирога\n\n\x00🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_five_shots_fit_beside_the_longest_answer(merges: list[tuple[str, str]]) -> None:
    """lm_eval asks for 512 tokens after five worked examples; the profile for CPUs has 1024."""
    tokenizer = vocabulary.build(merges)
    for seed in range(40):
        *shots, last = questions.held_out_examples(seed, 6, family="word problem")
        prompt = questions.few_shot_prompt(shots, last.question)
        assert len(tokenizer.encode(prompt).ids) <= 512
