# SPDX-License-Identifier: Apache-2.0
"""The sizes that the product knows by itself."""

from __future__ import annotations

from kimi_k3.checkpoint import read_config
from kimi_k3.checkpoint.published import published_config

from .imitation import PUBLISHED_CONFIG


def test_they_are_the_published_ones() -> None:
    """All that is read of the published config.json, and a figure that everybody knows."""
    assert published_config() == read_config(PUBLISHED_CONFIG)
    assert published_config().text_config.num_experts == 896
