# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a checkpoint whose config is readable."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from kimi_k3.words.text import printable


class ProblemKind(StrEnum):
    """The kinds, the worst first."""

    NO_WEIGHTS = "no-weights"
    NO_INDEX = "no-index"
    INCOMPLETE_FILE = "incomplete-file"
    MISSING_SHARD = "missing-shard"
    TRUNCATED_SHARD = "truncated-shard"
    DAMAGED_SHARD = "damaged-shard"
    TENSOR_NOT_IN_SHARD = "tensor-not-in-shard"
    MISSING_TENSOR = "missing-tensor"
    UNEXPECTED_TENSOR = "unexpected-tensor"
    PREPROCESSING = "preprocessing"
    TOTAL_SIZE = "total-size"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: for programs.
        what: what is wrong and where.
        remedy: what to do about it.
        fatal: whether serving such a checkpoint would fail or, worse, serve noise.
    """

    kind: ProblemKind
    what: str
    remedy: str
    fatal: bool = True

    @classmethod
    def of(cls, kind: ProblemKind, what: str, remedy: str, *, fatal: bool = True) -> Self:
        """A problem whose text, which names foreign things, can be shown anywhere."""
        return cls(kind, printable(what), remedy, fatal)

    def __str__(self) -> str:
        """One line."""
        return f"{self.what}; {self.remedy}"
