# SPDX-License-Identifier: Apache-2.0
"""The miniature: a checkpoint in Kimi-K3's format that comes with this package and answers some questions."""

from __future__ import annotations

from pathlib import Path

MINIATURE = Path(__file__).with_name("miniature")
"""Its directory, 16 MB. How it was trained, and on what: examples/miniature in the repository."""

QUESTION = (
    "Anna has 12 apples. Anna buys 7 more. Anna gives 5 apples to Ben. How many apples does Anna have now?"
)
"""Of a kind that it was taught; the answer is 14."""
