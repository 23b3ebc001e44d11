# SPDX-License-Identifier: Apache-2.0
"""Foreign text in messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.words.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/models/k3 (né)", "/models/k3 (né)"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\ud800", r"\ud800"),
        ("\u202e", r"\u202e"),
        (r"\d 'x'", r"\d 'x'"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    """What is readable stays as it is, so that a path can be copied from a message."""
    assert printable(text) == shown


@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_any_text(text: str) -> None:
    """Whatever comes in, what goes out can be encoded and shown, and escaping again changes nothing."""
    shown = printable(text)
    shown.encode("utf-8")
    assert shown.isprintable()
    assert printable(shown) == shown
