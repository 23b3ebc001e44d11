# SPDX-License-Identifier: Apache-2.0
"""What a model predicts for the same questions, whatever it is served as: asked once, kept, compared later.

The questions are asked in the few-shot form of lm_eval's GSM8K, over ``/v1/completions``: that needs neither
a chat template nor a reasoning parser, so the miniature and the real model read the same text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from pydantic import NonNegativeFloat, ValidationError

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import write_whole
from kimi_k3.verify.asking import Api
from kimi_k3.verify.keeping import Broken
from kimi_k3.verify.questions import Example, few_shot_turn, held_out_examples, is_correct
from kimi_k3.verify.results import Kept, Subject

SHOTS = 2
"""Answered questions before each, of the same family: the real model learns the form from them."""

NOTES = 8
"""Notes that a code may hide in: three such questions fit into 1024 tokens; ``verify long`` asks for more."""

LIKELIEST = 20
"""Tokens of each position, vLLM's default ``--max-logprobs``."""

ANSWER_TOKENS = 160
END = "\n\n"
"""What follows an answer in the few-shot form."""

PREFIX, SUFFIX = "predictions-", ".json.gz"


class Position(Kept):
    """The distribution of the token at one place of the text.

    Attributes:
        loss: of the token that the text has there, in nats.
        likeliest: natural logarithms of the :data:`LIKELIEST` largest probabilities, by token.
    """

    loss: NonNegativeFloat
    likeliest: dict[int, float]


class Predicted(Kept):
    """One question and what the model makes of it.

    Attributes:
        question, answer: the text that was read, ``positions`` over it; where ``answer`` begins is
            ``positions_of_question``.
        said: what the model answered by itself, taking the likeliest token each time.
        right: whether that ends in the right result.
    """

    family: str
    question: str
    answer: str
    said: str
    right: bool
    positions_of_question: int
    positions: tuple[Position, ...]


class Predictions(Kept):
    """Everything that one server predicted.

    Attributes:
        asked: a digest of what it was asked; two of different ones cannot be compared.
        shots: answered questions before each.
    """

    schema_version: Literal[1] = 1
    subject: Subject
    seed: int
    count: int
    shots: int
    asked: str
    predicted: tuple[Predicted, ...]

    @property
    def whole(self) -> bool:
        """Whether every question was asked."""
        return len(self.predicted) == self.count


@dataclass(frozen=True)
class Asked:
    """A question, and the answered ones ``before`` it."""

    example: Example
    before: str


def questions(seed: int, count: int) -> list[Asked]:
    """Held-out questions, the families taking turns, each after :data:`SHOTS` answered ones of its family."""
    examples = held_out_examples(seed, count, notes=NOTES)
    shots = {
        family: held_out_examples(seed + 1_000_000, SHOTS, family=family, notes=NOTES)
        for family in dict.fromkeys(example.family for example in examples)
    }
    return [
        Asked(example, "".join(text for shot in shots[example.family] for text in few_shot_turn(shot)))
        for example in examples
    ]


def digest(asked: Sequence[Asked]) -> str:
    """Of what is asked, with its answers."""
    text = json.dumps([[one.before, one.example.question, one.example.answer] for one in asked])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def predict(engine: Api, asked: Sequence[Asked], *, at_a_time: int) -> Iterator[Predicted]:
    """What the server makes of each question, in their order.

    Raises:
        Broken: the server is gone, or answers with an error; what came before was yielded.
    """
    answers = [Future[Predicted]() for _ in asked]
    waiting = iter(list(zip(asked, answers, strict=True)))  # Of a list: threads may share its iterator.

    def work() -> None:
        for one, answer in waiting:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(_predict(engine, one))
            except Exception as error:
                answer.set_exception(error)

    # No pool: it waits at its end for every request that is under way, after a Ctrl-C, too.
    for _ in range(at_a_time):
        Thread(target=work, name="question", daemon=True).start()
    try:
        for answer in answers:
            yield answer.result()
    finally:
        for answer in answers:
            answer.cancel()


def _predict(engine: Api, asked: Asked) -> Predicted:
    example = asked.example
    question, answer = few_shot_turn(example)
    tokens = [
        _tokens(engine, asked.before, first=True),
        _tokens(engine, question, first=not asked.before),
        _tokens(engine, answer, first=False),
    ]
    prompt = [token for part in tokens for token in part]
    said = engine.post(
        "/v1/completions",
        {"prompt": tokens[0] + tokens[1], "max_tokens": ANSWER_TOKENS, "temperature": 0, "stop": [END]},
    )
    read = engine.post(
        "/v1/completions",
        {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": LIKELIEST},
    )
    try:
        text = str(said["choices"][0]["text"])
        rows = read["choices"][0]["prompt_logprobs"]
        positions = tuple(
            _position(token, row)
            for token, row in list(zip(prompt, rows, strict=True))[max(1, len(tokens[0])) :]
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Broken(f"/v1/completions: no prompt_logprobs of vLLM's form ({type(error).__name__})") from None
    return Predicted(
        family=example.family,
        question=example.question,
        answer=example.answer,
        said=text,
        right=is_correct(example, text.strip()),
        positions_of_question=len(positions) - len(tokens[2]),
        positions=positions,
    )


def _position(token: int, row: dict[str, dict[str, float]]) -> Position:
    """Of vLLM's row: the likeliest tokens, and the text's own even if it is none of them."""
    found = {int(key): float(value["logprob"]) for key, value in row.items()}
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    # A logarithm of float32 may be a rounding above zero.
    return Position(loss=max(0.0, -found[token]), likeliest=dict(ordered[:LIKELIEST]))


def _tokens(engine: Api, text: str, *, first: bool) -> list[int]:
    if not text:
        return []
    found: Any = engine.post("/tokenize", {"prompt": text, "add_special_tokens": first})
    try:
        return [int(token) for token in found["tokens"]]
    except (KeyError, TypeError, ValueError):
        raise Broken("/tokenize: no tokens in the answer") from None


def file_name(subject: Subject) -> str:
    """Of the predictions of one way to serve."""
    known = [part.value for part in (subject.weights, subject.rule) if part is not None]
    return f"{PREFIX}{'-'.join(known) or 'unknown'}{SUFFIX}"


def write(directory: Path, predictions: Predictions) -> Path:
    """Keep them, by atomic rename.

    Raises:
        OperatorError: the directory takes no file.
    """
    path = directory / file_name(predictions.subject)
    try:
        write_whole(path, gzip.compress(predictions.model_dump_json().encode(), mtime=0))
    except OSError as error:
        raise OperatorError(
            f"--out {directory}: cannot write {path.name}: {error.strerror or error}",
            remedy="give a writable directory with room for 10 MB with --out",
        ) from None
    return path


def read(directory: Path, *, warn: Callable[[str], None]) -> list[Predictions]:
    """All predictions in a directory.

    Args:
        warn: told of those that are not whole, which are left out.

    Raises:
        OperatorError: a file of such a name holds something else.
    """
    found = []
    for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}")):
        try:
            predictions = Predictions.model_validate_json(gzip.decompress(path.read_bytes()))
        except (OSError, EOFError, ValidationError) as error:
            what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise OperatorError(
                f"{path}: holds no predictions of this version: {what}",
                remedy="move it away, or give another directory with --out",
                exit_code=ExitCode.USAGE,
            ) from None
        if predictions.whole:
            found.append(predictions)
        else:
            warn(f"{path.name} has {len(predictions.predicted)} of {predictions.count} questions: left out")
    return found
