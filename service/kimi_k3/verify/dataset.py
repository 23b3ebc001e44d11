# SPDX-License-Identifier: Apache-2.0
"""GSM8K, or questions in its form, as files on this machine; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.verify.questions import Example, final_answer

GSM8K_QUESTIONS: Final = {"train": 7473, "test": 1319}
"""Of GSM8K's two splits (Cobbe et al., 2021; openai/gsm8k, main)."""

HOW_TO_GET = (
    "on a machine with network: hf download openai/gsm8k --repo-type dataset --local-dir gsm8k; "
    "copy the directory here and give it with --dataset, or --own for the miniature's own word problems"
)


@dataclass(frozen=True)
class Dataset:
    """Questions with worked answers, in two parts.

    Attributes:
        reader: of the files, the ``datasets`` library's word for it.
        train, test: files of the questions that are shown with their answers, and of those that are asked.
        shown, asked: what is in them.
    """

    reader: Literal["json", "parquet"]
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    shown: tuple[Example, ...]
    asked: tuple[Example, ...]

    @property
    def is_gsm8k(self) -> bool:
        """Whether it has as many questions as GSM8K; other files of the same size are not told from it."""
        return {"train": len(self.shown), "test": len(self.asked)} == GSM8K_QUESTIONS

    def longest_prompt(self, shots: int) -> str:
        """A text that no prompt is longer than: the longest answered questions, then the longest question."""
        told = [f"Question: {one.question}\nAnswer: {one.answer}\n\n" for one in self.shown]
        last = max((one.question for one in self.asked), key=len)
        return "".join(sorted(told, key=len)[-shots:]) + f"Question: {last}\nAnswer:"


def read_dataset(directory: Path, shots: int) -> Dataset:
    """The files in ``directory``: ``main/train-*.parquet`` as the hub has them, or ``train.jsonl``; so test.

    Args:
        shots: the least that ``train`` must hold.

    Raises:
        OperatorError: there are none, or they hold something else.
    """
    layouts = (directory / "main", "*.parquet"), (directory, "*.parquet"), (directory, ".jsonl")
    found = ([sorted(where.glob(part + ending)) for part in GSM8K_QUESTIONS] for where, ending in layouts)
    train, test = next((parts for parts in found if all(parts)), ([], []))
    if not train:
        raise _wrong(
            directory, "holds neither main/train-*.parquet and main/test-*.parquet nor *.jsonl of both"
        )
    # lm_eval runs in another directory.
    dataset = Dataset(
        reader="parquet" if train[0].suffix == ".parquet" else "json",
        train=tuple(path.absolute() for path in train),
        test=tuple(path.absolute() for path in test),
        shown=_examples(train),
        asked=_examples(test),
    )
    if len(dataset.shown) < shots:
        raise _wrong(
            directory, f"train has {len(dataset.shown)} questions, and {shots} are shown before each"
        )
    if not dataset.asked:
        raise _wrong(directory, "test has no questions")
    return dataset


def write_dataset(directory: Path, shown: Sequence[Example], asked: Sequence[Example]) -> Dataset:
    """Write questions as GSM8K's JSON lines, ``train.jsonl`` and ``test.jsonl``."""
    paths = directory / "train.jsonl", directory / "test.jsonl"
    for path, examples in zip(paths, (shown, asked), strict=True):
        lines = (json.dumps({"question": one.question, "answer": one.answer}) for one in examples)
        path.write_text("".join(f"{line}\n" for line in lines))
    return Dataset("json", paths[:1], paths[1:], tuple(shown), tuple(asked))


def _examples(paths: Sequence[Path]) -> tuple[Example, ...]:
    return tuple(_example(path, row) for path in paths for row in _rows(path))


def _example(path: Path, row: object) -> Example:
    match row:
        case {"question": str(question), "answer": str(answer)} if final_answer(answer) is not None:
            return Example("gsm8k", question, answer)
    raise _wrong(path, "not every line has a question and an answer that ends in #### and a number")


def _rows(path: Path) -> list[object]:
    try:
        if path.suffix == ".parquet":
            # Comes with lm_eval, whose own reader of such files it is.
            import pyarrow.parquet as parquet

            return list(parquet.read_table(path).to_pylist())
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        # pyarrow's errors are ValueErrors; an LFS pointer in place of the file is the usual one.
        raise _wrong(path, f"cannot be read: {' '.join(str(error).split())[:120]}") from None


def _wrong(path: Path, why: str) -> OperatorError:
    return OperatorError(f"--dataset {path}: {why}", remedy=HOW_TO_GET, exit_code=ExitCode.USAGE)
