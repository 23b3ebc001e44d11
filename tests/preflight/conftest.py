# SPDX-License-Identifier: Apache-2.0
"""The made-up node that most tests break in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from .node import Node, mi325x_node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return mi325x_node(tmp_path / "node")
