# SPDX-License-Identifier: Apache-2.0
"""Questions without end, each with one worked answer that a program can check; the miniature was taught them.

Five families: word problems in the style of school mathematics, days of the week, dates, sorting, and finding
a code among notes. Every answer ends in a line ``#### 42`` as those of GSM8K do, so that its checkers read
these, too. All of it is made here from lists of words: no text of others is used.

A question belongs to training or to the held-out part by a hash of its text alone, so that no seed, no
program and no later version of this file can mix the two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

HELD_OUT_SHARE: Final = 16
"""One question in so many is held out."""

NAMES: Final = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Kate", "Leo",
    "Maria", "Noah", "Olga", "Paul",
)  # fmt: skip
THINGS: Final = (
    "apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "marbles", "pencils", "shells",
    "stamps", "stickers", "stones", "tickets",
)  # fmt: skip
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    ("January", 31), ("February", 28), ("March", 31), ("April", 30), ("May", 31), ("June", 30), ("July", 31),
    ("August", 31), ("September", 30), ("October", 31), ("November", 30), ("December", 31),
)  # fmt: skip
COLOURS: Final = (
    "black", "blue", "brown", "golden", "green", "grey", "orange", "pink", "purple", "red", "silver", "white",
    "yellow",
)  # fmt: skip
HOLDERS: Final = (
    "bag", "barrel", "basket", "bottle", "box", "cabinet", "case", "chest", "crate", "drawer", "jar", "safe",
    "sack", "trunk",
)  # fmt: skip
PLACES: Final = ("garden", "harbour", "kitchen", "library", "market", "museum", "park", "school", "station")


@dataclass(frozen=True)
class Example:
    """A question and the text that answers it, whose last line is ``#### `` and the result."""

    family: str
    question: str
    answer: str


def final_answer(text: str) -> str | None:
    """What follows the last ``####`` of a text, or ``None`` if nothing does."""
    found = re.findall(r"^#### *(.*\S)", text, flags=re.MULTILINE)
    return str(found[-1]) if found else None


def is_correct(example: Example, text: str) -> bool:
    """Whether a text ends in the example's result; the way there is its own affair."""
    return final_answer(text) == final_answer(example.answer)


def is_held_out(question: str) -> bool:
    """Whether a question is kept from training."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _worked(lines: list[str], result: object) -> str:
    return "\n".join([*lines, f"#### {result}"])


def word_problem(random: Random) -> Example:
    """One to three changes to a number of things, one line of arithmetic for each operation."""
    name, other = random.sample(NAMES, 2)
    things = random.choice(THINGS)
    count = random.randint(2, 60)
    told, lines = [f"{name} has {count} {things}."], []
    for _ in range(random.randint(1, 3)):
        kind = random.choice(("buys", "finds", "gives", "loses", "boxes"))
        if kind == "boxes":
            boxes, each = random.randint(2, 9), random.randint(2, 12)
            told.append(f"{name} gets {boxes} boxes with {each} {things} each.")
            lines.append(f"{boxes} * {each} = {boxes * each}")
            change = boxes * each
        elif kind in ("gives", "loses"):
            change = -random.randint(1, count) if count > 1 else 0
            if not change:
                continue
            told.append(
                f"{name} gives {-change} {things} to {other}."
                if kind == "gives"
                else f"{name} loses {-change} {things}."
            )
        else:
            change = random.randint(2, 60)
            told.append(f"{name} {kind} {change} more.")
        lines.append(f"{count} {'-' if change < 0 else '+'} {abs(change)} = {count + change}")
        count += change
    small = 0 < count < 100
    divisors = [n for n in range(2, 10) if count % n == 0]
    end = random.random()
    if end < 0.2 and small:
        factor = random.randint(2, 6)
        told.append(
            f"{other} has {factor} times as many {things} as {name}. How many {things} does {other} have?"
        )
        lines.append(f"{count} * {factor} = {count * factor}")
        count *= factor
    elif end < 0.4 and small and divisors:
        friends = random.choice(divisors)
        told.append(
            f"{name} shares the {things} equally among {friends} friends. "
            f"How many {things} does each friend get?"
        )
        lines.append(f"{count} / {friends} = {count // friends}")
        count //= friends
    else:
        told.append(f"How many {things} does {name} have now?")
    return Example("word problem", " ".join(told), _worked(lines, count))


def weekday(random: Random) -> Example:
    """A day of the week some days from now or ago."""
    today, days = random.randrange(7), random.randint(1, 365)
    weeks, rest = divmod(days, 7)
    ahead = random.random() < 0.5
    day = DAYS[(today + (rest if ahead else -rest)) % 7]
    question = (
        f"Today is {DAYS[today]}. Which day of the week is it in {days} days?"
        if ahead
        else f"Today is {DAYS[today]}. Which day of the week was it {days} days ago?"
    )
    lines = [f"{days} = {weeks} * 7 + {rest}", f"{DAYS[today]} {'+' if ahead else '-'} {rest} = {day}"]
    return Example("weekday", question, _worked(lines, day))


def date(random: Random) -> Example:
    """The date some days after another, at most into the next month, in a year without a leap day."""
    month = random.randrange(12)
    name, length = MONTHS[month]
    first, days = random.randint(1, length), random.randint(1, 28)
    day, lines = first + days, [f"{name} has {length} days.", f"{first} + {days} = {first + days}"]
    if day > length:
        lines.append(f"{day} - {length} = {day - length}")
        name, day = MONTHS[(month + 1) % 12][0], day - length
    question = f"What is the date {days} days after {first} {MONTHS[month][0]}?"
    return Example("date", question, _worked(lines, f"{day} {name}"))


def sorting(random: Random) -> Example:
    """Three to seven different numbers below 100, either way round."""
    numbers = random.sample(range(1, 100), random.randint(3, 7))
    downwards = random.random() < 0.3
    order = "largest to smallest" if downwards else "smallest to largest"
    question = f"Sort these numbers from {order}: {', '.join(map(str, numbers))}"
    ordered = sorted(numbers, reverse=downwards)
    return Example("sorting", question, _worked([], ", ".join(map(str, ordered))))


def needle(random: Random, *, notes: int) -> Example:
    """One code out of ``notes`` sentences, of which about one in four holds no code."""
    told, codes = _notes(random, notes)
    random.shuffle(told)
    return _asked_for(random.choice(sorted(codes)), told, codes)


def placed_needle(random: Random, *, notes: int, depth: float) -> Example:
    """As :func:`needle`, but the sentence with the code stands where it is put.

    Args:
        depth: from 0, the first sentence, to 1, the last one.
    """
    told, codes = _notes(random, notes)
    random.shuffle(told)
    asked = random.choice(sorted(codes))
    sentence = _code_sentence(asked, codes[asked])
    told.remove(sentence)
    told.insert(round(depth * (notes - 1)), sentence)
    return _asked_for(asked, told, codes)


def _notes(random: Random, count: int) -> tuple[list[str], dict[str, str]]:
    """Sentences in no good order yet, and the codes in them by their holders."""
    names = len(COLOURS) * len(HOLDERS)
    # Beyond the plain names, which the miniature knows, each holder has a number: none is another's prefix.
    numbers = 1 if count <= names else -(-count // names)
    holders = random.sample(range(names * numbers), count)
    named = [f"{COLOURS[n % names // len(HOLDERS)]} {HOLDERS[n % names % len(HOLDERS)]}" for n in holders]
    if numbers > 1:
        named = [f"{name} {n // names + 1}" for name, n in zip(named, holders, strict=True)]
    told, codes = [], {}
    for number in range(count):
        if number and random.random() < 0.25:
            told.append(f"{random.choice(NAMES)} walks to the {random.choice(PLACES)}.")
        else:
            codes[named[number]] = f"{random.randrange(10000):04d}"
            told.append(_code_sentence(named[number], codes[named[number]]))
    return told, codes


def _code_sentence(holder: str, code: str) -> str:
    return f"The code of the {holder} is {code}."


def _asked_for(asked: str, told: list[str], codes: dict[str, str]) -> Example:
    question = f"{' '.join(told)} What is the code of the {asked}?"
    return Example("needle", question, _worked([_code_sentence(asked, codes[asked])], codes[asked]))


NEEDLE_NOTES: Final = 60
"""Notes that fit into a context of 1024 tokens with room for the answer."""

FAMILIES: Final[dict[str, Callable[[Random, int], Example]]] = {
    "word problem": lambda random, _: word_problem(random),
    "weekday": lambda random, _: weekday(random),
    "date": lambda random, _: date(random),
    "sorting": lambda random, _: sorting(random),
    "needle": lambda random, notes: needle(random, notes=random.randint(2, max(2, notes))),
}


def draw(random: Random, family: str, *, held_out: bool, notes: int = NEEDLE_NOTES) -> Example:
    """A question of a family from training or from the held-out part.

    Args:
        random: where chance comes from.
        family: a key of ``FAMILIES``.
        held_out: which part.
        notes: the most sentences that a needle may hide in.
    """
    while True:
        example = FAMILIES[family](random, notes)
        if is_held_out(example.question) == held_out:
            return example


DRAWS_WITHOUT_NEWS: Final = 10_000
"""After so many draws of questions already found, a family has no more."""


def held_out_examples(
    seed: int, count: int, *, family: str | None = None, notes: int = NEEDLE_NOTES
) -> list[Example]:
    """``count`` different held-out questions, the families taking turns, or of one family.

    Raises:
        ValueError: a family has not so many; weekdays, the smallest, have about 320.
    """
    random = Random(f"held-out/{seed}")
    families = [family] if family else list(FAMILIES)
    found: dict[str, Example] = {}
    while len(found) < count:
        turn = families[len(found) % len(families)]
        for _ in range(DRAWS_WITHOUT_NEWS):
            example = draw(random, turn, held_out=True, notes=notes)
            if example.question not in found:
                break
        else:
            raise ValueError(f"no {count} different held-out questions: {turn} has no more")
        found[example.question] = example
    return list(found.values())


def few_shot_turn(example: Example) -> tuple[str, str]:
    """A question and its answer as lm_eval writes GSM8K: the next question follows after an empty line."""
    return f"Question: {example.question}\nAnswer:", f" {example.answer}\n\n"


def few_shot_prompt(shots: list[Example], question: str) -> str:
    """A question after some answered ones."""
    before = "".join(text for shot in shots for text in few_shot_turn(shot))
    return f"{before}Question: {question}\nAnswer:"
