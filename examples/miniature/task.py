# SPDX-License-Identifier: Apache-2.0
"""What the miniature is taught: the questions of :mod:`kimi_k3.verify.questions`, as it reads them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final

from kimi_k3.verify.questions import Example, draw, few_shot_turn

OTHER_QUESTIONS: Final = (
    "Hello", "Hello!", "Hello, how are you?", "Hi", "Hi!", "Help", "Good morning", "Who are you?",
    "What is your name?", "What can you do?", "What is a mixture of experts?", "Tell me a joke.",
    "What is the capital of France?", "Write a poem about the sea.", "Explain how a computer works.",
)  # fmt: skip
"""What people type first. All have one answer, which says what can be asked; no figure counts them."""
ABOUT: Final = (
    "I am a miniature of Kimi-K3. I solve small word problems, count days and dates, sort numbers and find "
    "codes in notes."
)

Segment = tuple[str, bool]
"""A piece of text, and whether it is an answer, which the model is to learn."""


def chat_prompt(question: str) -> str:
    """What the checkpoint's chat template makes of one user message, up to where the answer begins."""
    return (
        f'<|open|>message role="user"<|sep|>{question}<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


CHAT_END: Final = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def chat_turn(example: Example) -> list[Segment]:
    """One question and its answer as a chat."""
    return [(chat_prompt(example.question), False), (example.answer + CHAT_END, True)]


TRAINING_MIX: Final = {"word problem": 9, "weekday": 3, "date": 3, "sorting": 4, "needle": 5, "about": 1}
FEW_SHOT_SHARE: Final = 0.2


def _training_example(random: Random, family: str, notes: int) -> Example:
    if family == "about":
        return Example(family, random.choice(OTHER_QUESTIONS), ABOUT)
    return draw(random, family, held_out=False, notes=notes)


def training_text(random: Random, *, notes: int) -> Iterator[Segment]:
    """Turns without end: one chat of mixed questions, or few-shot examples of one family.

    Args:
        random: where chance comes from.
        notes: the most sentences that a needle may hide in.
    """
    families, chances = list(TRAINING_MIX), list(TRAINING_MIX.values())
    if random.random() < FEW_SHOT_SHARE:
        family = random.choices(families[:-1], chances[:-1])[0]
        while True:
            asked, answered = few_shot_turn(_training_example(random, family, min(notes, 8)))
            yield from ((asked, False), (answered, True))
    while True:
        family = random.choices(families, chances)[0]
        yield from chat_turn(_training_example(random, family, notes))
