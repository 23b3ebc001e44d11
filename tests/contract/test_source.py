# SPDX-License-Identifier: Apache-2.0
"""Facts about source that is not imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.contract import source
from kimi_k3.contract.source import Fact

SOURCE = """
import torch
try:
    from elsewhere import imported as known
except ImportError:
    def known(a, b): ...
if torch.rocm:
    class Method:
        def __init__(self, moe): self.gate = moe
        def process(self, layer, *, key=None): ...
NAMES: dict[str, int] = {"one": 1, **{}}
"""


@pytest.mark.parametrize(
    ("fact", "lack"),
    [
        (Fact(file="m.py", name="Method", attribute="gate", why="w"), None),
        (Fact(file="m.py", name="Method", attribute="door", why="w"), "Method in m.py sets no door"),
        (Fact(file="m.py", name="Method.process", parameters=("layer", "key"), why="w"), None),
        (
            Fact(file="m.py", name="Method.process", parameters=("x",), why="w"),
            "Method.process in m.py takes no x",
        ),
        (Fact(file="m.py", name="Method.other", why="w"), "m.py has no Method.other"),
        (Fact(file="m.py", name="NAMES", key="one", why="w"), None),
        (Fact(file="m.py", name="NAMES", key="two", why="w"), "NAMES in m.py has no 'two'"),
        (Fact(file="m.py", name="known", why="w"), None),
        (Fact(file="n.py", name="known", why="w"), "n.py cannot be read (No such file or directory)"),
    ],
)
def test_facts(tmp_path: Path, fact: Fact, lack: str | None) -> None:
    """What a later contract is made of."""
    (tmp_path / "m.py").write_text(SOURCE)
    assert source.missing(tmp_path, fact) == lack


@given(st.binary())
def test_any_source(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    """A damaged installation is a finding."""
    directory = tmp_path_factory.mktemp("source")
    (directory / "m.py").write_bytes(raw)
    source.missing(directory, Fact(file="m.py", name="a.b", why="w"))
