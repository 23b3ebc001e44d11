# SPDX-License-Identifier: Apache-2.0
"""What int4 changes in the predicted distributions: ``python -m examples.miniature.divergence``.

Held-out questions with their answers go through the reference forward with the exact MXFP4 experts and with
each int4 rule. Per position: the Kullback-Leibler divergence KL(MXFP4 || int4) in nats, and whether the most
probable token is the same. An answer's positions and its question's are told apart: the question's tokens are
mostly chance, and so are the predictions there. A second figure keeps the exact model's choice of experts,
which tells the noise of the weights from what a tipped choice adds. Run it at the repository's root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from tests.reference import forward
from tests.reference.forward import ReferenceModel, Weights
from tokenizers import Tokenizer
from torch import Tensor

from examples.miniature import task
from kimi_k3.verify import questions

RULES: tuple[Weights, ...] = ("int4-amax", "int4-mse")
KEPT = "with the exact model's choice of experts"


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) of logits ``[T, vocab]``, per position, in nats."""
    first, second = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return (first.exp() * (first - second)).sum(-1)


@contextlib.contextmanager
def experts_noted(choices: list[Tensor]) -> Iterator[None]:
    """Note which experts the router of each layer chooses, one ``[T, top_k]`` a layer."""
    route = forward.route

    def noting(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
        chosen, weights = route(logits, bias, top_k, scale)
        choices.append(chosen)
        return chosen, weights

    forward.route = noting
    try:
        yield
    finally:
        forward.route = route


@contextlib.contextmanager
def experts_kept(choices: list[Tensor]) -> Iterator[None]:
    """Let the routers weigh, by their own scores, the experts that were noted."""
    route, noted = forward.route, iter(choices)

    def keeping(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
        chosen = next(noted)
        weights = logits.sigmoid().gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * scale

    forward.route = keeping
    try:
        yield
    finally:
        forward.route = route


def figures(exact: Tensor, other: Tensor, answer: slice) -> dict[str, float]:
    """Means over the positions of one question and of its answer."""
    kl, same = divergence(exact, other), (exact.argmax(-1) == other.argmax(-1)).double()
    question = slice(0, answer.start)
    return {
        "answer_kl": float(kl[answer].mean()),
        "question_kl": float(kl[question].mean()),
        "all_kl": float(kl.mean()),
        "answer_top1": float(same[answer].mean()),
        "all_top1": float(same.mean()),
    }


def mean_and_error(values: list[float]) -> dict[str, float]:
    """Mean over questions and its standard error."""
    return {"mean": fmean(values), "standard_error": stdev(values) / math.sqrt(len(values))}


def compare(checkpoint: Path, examples: list[questions.Example]) -> dict[str, Any]:
    """Every figure by rule: over all questions, and question by question."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    models = {rule: ReferenceModel.load(checkpoint, weights=rule) for rule in ("mxfp4", *RULES)}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for example in examples:
        question, answer = (tokenizer.encode(text).ids for text, _ in task.chat_turn(example))
        tokens, of_answer = question + answer, slice(len(question) - 1, None)
        choices: list[Tensor] = []
        with experts_noted(choices):
            exact = models["mxfp4"].logits(tokens)
        for rule in RULES:
            with experts_kept(choices):
                kept = models[rule].logits(tokens)
            for label, other in ((rule, models[rule].logits(tokens)), (f"{rule} {KEPT}", kept)):
                # Row t predicts the token after t; the last row's would follow the end of the answer.
                for name, value in figures(exact[:-1], other[:-1], of_answer).items():
                    found[label][name].append(value)
    return {
        "questions": len(examples),
        "rules": {
            rule: {name: mean_and_error(values) for name, values in by_name.items()}
            for rule, by_name in found.items()
        },
        "ratio_mse_to_amax": {
            f"{name}{rest}": fmean(found[f"int4-mse{rest}"][name]) / fmean(found[f"int4-amax{rest}"][name])
            for name in ("answer_kl", "question_kl", "all_kl")
            for rest in ("", f" {KEPT}")
        },
        "each": found,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument(
        "--notes", type=int, default=questions.NEEDLE_NOTES, help="in a needle question, at most"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small
    examples = questions.held_out_examples(arguments.seed, arguments.count, notes=arguments.notes)
    found = compare(arguments.checkpoint, examples)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in ("questions", "rules", "ratio_mse_to_amax")}, indent=1))


if __name__ == "__main__":
    main()
