# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 verify long``: whether the deployment finds a code among more and more notes.

Each question hides one code at the beginning, in the middle or at the end of a text of notes, in chat form,
and the answer is checked. The lengths double until the server's context is full. Upstream had not
validated long contexts when it published (vllm-project/vllm#51274), so there is nothing to compare with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.verify.asking import Api, api, shown, subject_of
from kimi_k3.verify.keeping import Broken, kept
from kimi_k3.verify.questions import Example, final_answer, is_held_out, placed_needle
from kimi_k3.verify.results import Curve, Figure, Kind, Row, Setting, State
from kimi_k3.verify.statistics import share_error, wilson
from kimi_k3.verify.target import Target

PATH: Final = "/v1/chat/completions"
DEPTHS: Final = {"beginning": 0.0, "middle": 0.5, "end": 1.0}
"""Where in the text the code stands, by turns."""

FIRST_NOTES: Final = 4
ANSWER_TOKENS: Final = 128
"""The miniature's answers have about 20."""
LEAST_TOKENS: Final = 256
"""Of a context: the first notes, what a chat puts around them, and an answer."""
SPARE: Final = 0.03
"""Of a length that was reckoned from shorter ones: names and numbers differ in tokens."""
WORTH: Final = 1.25
"""The last length is filled up if it grows by this factor at least."""
LEAST_SHARE: Final = 0.9
LEAST_UPPER_END: Final = 0.95


@dataclass(frozen=True)
class Asked:
    """A question that was answered.

    Attributes:
        depth: a name of ``DEPTHS``.
        tokens: of the prompt, by the server's count.
    """

    depth: str
    right: bool
    tokens: int
    answer: str


@dataclass(frozen=True)
class Length:
    """The questions of one length.

    Attributes:
        each: how many are to be asked; fewer of ``asked`` are a part.
    """

    notes: int
    asked: tuple[Asked, ...]
    each: int

    @property
    def right(self) -> int:
        """Answers with the code."""
        return sum(one.right for one in self.asked)

    @property
    def count(self) -> int:
        """Questions that were answered."""
        return len(self.asked)

    @property
    def whole(self) -> bool:
        """Whether all were."""
        return self.count == self.each

    @property
    def tokens(self) -> float:
        """Of a prompt, in the mean."""
        return fmean(one.tokens for one in self.asked)

    @property
    def most_tokens(self) -> int:
        """Of the longest prompt."""
        return max(one.tokens for one in self.asked)


def is_found(example: Example, text: str) -> bool:
    """Whether an answer gives the code.

    Its last ``####`` line counts, if it has one. Else the code must be the only one in the text: an answer
    that repeats the notes holds every code and gives none.
    """
    code, said = final_answer(example.answer), final_answer(text)
    if said is not None:
        return said == code
    return set(re.findall(r"(?<!\w)\d{4}(?!\w)", text)) == {code}


def question(seed: int, notes: int, number: int) -> tuple[str, Example]:
    """The ``number``-th held-out question of a length, and where its code stands."""
    depth = list(DEPTHS)[number % len(DEPTHS)]
    random = Random(f"long/{seed}/{notes}/{number}")
    while True:
        example = placed_needle(random, notes=notes, depth=DEPTHS[depth])
        if is_held_out(example.question):
            return depth, example


def next_notes(measured: Sequence[Length], room: int) -> int | None:
    """How many notes come next: twice as many while they fit, at last as many as fit, then ``None``.

    Args:
        measured: the lengths so far, growing.
        room: tokens of the longest prompt.
    """
    last = measured[-1]
    per_note = last.most_tokens / last.notes
    if len(measured) > 1:
        before = measured[-2]
        per_note = (last.most_tokens - before.most_tokens) / (last.notes - before.notes)
    fitting = last.notes + int((room * (1 - SPARE) - last.most_tokens) / max(per_note, 1))
    if 2 * last.notes <= fitting:
        return 2 * last.notes
    return fitting if fitting >= WORTH * last.notes else None


def row_of(length: Length) -> Row:
    """Whether a length is answered as it should be.

    Two things must hold. At least nine of ten codes are found: below that a user sees it, whatever chance
    did. And the 95 % interval of the share does not end below 95 %: with many questions nine of ten are not
    enough. With the few questions of the default only the first one decides, and all must be found: one miss
    of six may be chance, so that a failed length is worth asking again with a larger ``--each``.

    A part of the questions passes and fails nothing.
    """
    low, high = wilson(length.right, length.count)
    good = length.right / length.count >= LEAST_SHARE and high >= LEAST_UPPER_END
    places = [
        f"{depth} {sum(one.right for one in there)}/{len(there)}"
        for depth in DEPTHS
        if (there := [one for one in length.asked if one.depth == depth])
    ]
    told = [
        f"{length.right}/{length.count} codes found (95 % interval {low:.0%} to {high:.0%})",
        f"{length.tokens:.0f} prompt tokens",
        ", ".join(places),
    ]
    if not length.whole:
        told.insert(0, f"partial, {length.count} of {length.each} questions")
    if wrong := next((one for one in length.asked if not one.right), None):
        told.append(f"a wrong answer ({wrong.depth}): {shown(wrong.answer) or 'nothing'}")
    return Row(
        name=f"needle in {length.notes} notes",
        state=(State.PASS if good else State.FAIL) if length.whole else State.NOT_RUN,
        evidence="; ".join(told),
    )


def figure_of(length: Length) -> Figure:
    """The share of codes found at a length."""
    low, high = wilson(length.right, length.count)
    return Figure(
        name=f"codes found at {length.tokens:.0f} prompt tokens",
        value=length.right / length.count,
        standard_error=share_error(length.right, length.count),
        low=low,
        high=high,
        count=length.count,
    )


def curves_of(measured: Sequence[Length]) -> list[Curve]:
    """The share over the length, with the lower end of its interval; and over the place, of all lengths."""
    over_length, x_label, y_label = "codes found over length", "prompt tokens", "share of codes found"
    tokens = tuple(length.tokens for length in measured)
    asked = [one for length in measured for one in length.asked]
    places = {
        place: [one.right for one in asked if one.depth == depth]
        for depth, place in DEPTHS.items()
        if any(one.depth == depth for one in asked)
    }
    return [
        Curve(
            plot=over_length,
            name="found",
            x_label=x_label,
            y_label=y_label,
            x=tokens,
            y=tuple(length.right / length.count for length in measured),
        ),
        Curve(
            plot=over_length,
            name="lower end of the 95 % interval",
            x_label=x_label,
            y_label=y_label,
            x=tokens,
            y=tuple(wilson(length.right, length.count)[0] for length in measured),
        ),
        Curve(
            plot="codes found by place",
            name="all lengths",
            x_label="place in the text, 0 the beginning, 1 the end",
            y_label=y_label,
            x=tuple(places),
            y=tuple(fmean(right) for right in places.values()),
        ),
    ]


def context(limit: int | None, up_to: int | None) -> int:
    """Tokens of the longest prompt and its answer.

    Args:
        limit: the server's, where it tells.
        up_to: the operator's.

    Raises:
        OperatorError: neither is known, or one leaves no room.
    """
    if up_to is not None and limit is not None and up_to > limit:
        raise OperatorError(
            f"--up-to {up_to}: the server takes {limit} tokens",
            remedy="give at most as many, or leave it out",
            exit_code=ExitCode.USAGE,
        )
    found = limit if up_to is None else up_to
    if found is None:
        raise OperatorError(
            "verify long: the server does not tell how long a context it takes",
            remedy="give --up-to",
            exit_code=ExitCode.USAGE,
        )
    if found < LEAST_TOKENS:
        raise OperatorError(
            f"verify long: {found} tokens are too short for a question and its answer",
            remedy=f"at least {LEAST_TOKENS} are needed (--up-to, and the server's limit)",
            exit_code=ExitCode.USAGE,
        )
    return found


def run_long(
    target: Target, out: Path, *, up_to: int | None, each: int, seed: int, report: Callable[[str], None]
) -> State:
    """Ask at every length and keep what is found.

    Args:
        up_to: tokens of the longest prompt and its answer; ``None`` for the server's limit.
        each: questions of a length.

    Raises:
        OperatorError: the deployment cannot be asked or is gone, or ``up_to`` does not fit it.
    """
    subject = subject_of(target)
    with api(target) as engine:
        try:
            limit = engine.length_limit()
        except Broken as error:
            raise OperatorError(f"verify long: {error}", remedy="look at the server's log") from None
        tokens = context(limit, up_to)
        settings: dict[str, Setting] = {
            "up to": tokens,
            "server's length limit": limit,
            "each": each,
            "seed": seed,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "thinking": False,
        }
        with kept(out, Kind.LONG, subject, settings) as sheet:
            done: list[Length] = []
            for length in lengths(engine, tokens - ANSWER_TOKENS, each, seed):
                measured = [*done, length]
                sheet.note(
                    rows=[row_of(one) for one in measured],
                    figures=[figure_of(one) for one in measured],
                    curves=curves_of(measured),
                )
                if length.whole:
                    done = measured
                    report(sheet.result.rows[-1].line)
    return sheet.result.state


def lengths(engine: Api, room: int, each: int, seed: int) -> Iterator[Length]:
    """Each length after each of its answers.

    Raises:
        Broken: the server is gone, or answers no longer.
    """
    done: list[Length] = []
    notes: int | None = FIRST_NOTES
    while notes is not None:
        length = Length(notes, (), each)
        for number in range(each):
            answer = ask(engine, *question(seed, notes, number))
            length = replace(length, asked=(*length.asked, answer))
            yield length
        done.append(length)
        notes = next_notes(done, room)


def ask(engine: Api, depth: str, example: Example) -> Asked:
    """One question and its answer.

    Raises:
        Broken: there is none.
    """
    answer = engine.post(
        PATH,
        {
            "messages": [{"role": "user", "content": example.question}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            # Retrieval is what is asked, in few tokens; Kimi-K3 thinks unless told not to.
            "chat_template_kwargs": {"thinking": False},
        },
    )
    text, tokens = parts_of(answer)
    return Asked(depth, is_found(example, text), tokens, text)


def parts_of(answer: Any) -> tuple[str, int]:
    """Text and prompt tokens of a chat completion.

    Raises:
        Broken: it is none.
    """
    try:
        text, tokens = answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
    except (KeyError, IndexError, TypeError):
        text, tokens = None, None
    if not isinstance(text, str | None) or not isinstance(tokens, int) or tokens < 1:
        raise Broken(f"{PATH}: no chat completion: {shown(str(answer))}")
    return text or "", tokens
