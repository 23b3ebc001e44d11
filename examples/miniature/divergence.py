# SPDX-License-Identifier: Apache-2.0
"""What int4 changes in the predicted distributions: ``python -m examples.miniature.divergence``.

Held-out questions with their answers go through the reference forward with the exact MXFP4 experts and with
each int4 rule. Per position: the Kullback-Leibler divergence KL(MXFP4 || int4) in nats, and whether the most
probable token is the same. An answer's positions and its question's are told apart: the question's tokens are
mostly chance, and so are the predictions there. Run it at the repository's root.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from tests.reference.forward import ReferenceModel, Weights
from tokenizers import Tokenizer
from torch import Tensor

from examples.miniature import task

RULES: tuple[Weights, ...] = ("int4-amax", "int4-mse")


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) of logits ``[T, vocab]``, per position, in nats."""
    first, second = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return (first.exp() * (first - second)).sum(-1)


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


def compare(checkpoint: Path, examples: list[task.Example]) -> dict[str, Any]:
    """Every figure by rule: over all questions, and question by question."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    models = {rule: ReferenceModel.load(checkpoint, weights=rule) for rule in ("mxfp4", *RULES)}
    found: dict[str, dict[str, list[float]]] = {rule: defaultdict(list) for rule in RULES}
    for example in examples:
        question, answer = (tokenizer.encode(text).ids for text, _ in task.chat_turn(example))
        # Row t predicts the token after t; the last row's would follow the end of the answer.
        rows = {rule: model.logits(question + answer)[:-1] for rule, model in models.items()}
        for rule in RULES:
            for name, value in figures(rows["mxfp4"], rows[rule], slice(len(question) - 1, None)).items():
                found[rule][name].append(value)
    return {
        "questions": len(examples),
        "rules": {
            rule: {name: mean_and_error(values) for name, values in by_name.items()}
            for rule, by_name in found.items()
        },
        "ratio_mse_to_amax": {
            name: fmean(found["int4-mse"][name]) / fmean(found["int4-amax"][name])
            for name in ("answer_kl", "question_kl", "all_kl")
        },
        "each": found,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument("--notes", type=int, default=task.NEEDLE_NOTES, help="in a needle question, at most")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small
    examples = task.held_out_examples(arguments.seed, arguments.count, notes=arguments.notes)
    found = compare(arguments.checkpoint, examples)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in ("questions", "rules", "ratio_mse_to_amax")}, indent=1))


if __name__ == "__main__":
    main()
