# SPDX-License-Identifier: Apache-2.0
"""Ask a running server held-out questions: ``python -m examples.miniature.evaluate --out FILE``.

Greedy, in chat form. An answer counts if its last ``####`` line is the result; FILE gets every answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kimi_k3.verify import questions
from kimi_k3.verify.statistics import share_error, wilson

MAX_TOKENS = 160
"""The longest answer has about 110."""
AT_A_TIME = 8
"""Requests; as many as the profile cpu-tiny serves at once."""


def summary(correct: Sequence[bool]) -> dict[str, Any]:
    """Count, accuracy, its standard error and its 95 % interval."""
    right, count = sum(correct), len(correct)
    return {
        "questions": count,
        "right": right,
        "accuracy": right / count,
        "standard_error": share_error(right, count),
        "interval_95": wilson(right, count),
    }


def ask(client: httpx.Client, model: str, example: questions.Example) -> str:
    """The server's answer to one question."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": example.question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    response = client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


def evaluate(url: str, model: str, examples: list[questions.Example]) -> dict[str, Any]:
    """Accuracy in all and by family, and every answer."""
    with (
        httpx.Client(base_url=url, timeout=600, trust_env=False) as client,
        ThreadPoolExecutor(AT_A_TIME) as threads,
    ):
        answers = list(threads.map(partial(ask, client, model), examples))
    correct = [questions.is_correct(example, text) for example, text in zip(examples, answers, strict=True)]
    families = {
        family: summary(
            [good for good, example in zip(correct, examples, strict=True) if example.family == family]
        )
        for family in dict.fromkeys(example.family for example in examples)
    }
    records = [
        asdict(example) | {"served": text, "correct": good}
        for example, text, good in zip(examples, answers, correct, strict=True)
    ]
    return {"all": summary(correct), "families": families, "answers": records}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="kimi-k3")
    parser.add_argument("--seed", type=int, default=1, help="of the questions; training looked at those of 0")
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    examples = questions.held_out_examples(arguments.seed, arguments.count)
    found = evaluate(arguments.url, arguments.model, examples)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, figures in {"all": found["all"], **found["families"]}.items():
        print(
            f"{name:>13}: {figures['right']} of {figures['questions']}"
            f"  {figures['accuracy']:.3f} +- {figures['standard_error']:.3f}"
        )


if __name__ == "__main__":
    main()
