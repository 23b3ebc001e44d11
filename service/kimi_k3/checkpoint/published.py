# SPDX-License-Identifier: Apache-2.0
"""The published checkpoint's config, for what can be done before there is a checkpoint."""

from __future__ import annotations

from functools import cache
from importlib import resources

from kimi_k3.checkpoint.config import KimiK3Config, parse_config

FILE = "published.json"
"""What is read here of moonshotai/Kimi-K3's ``config.json`` (revision f831ab66), and nothing else of it."""


@cache
def published_config() -> KimiK3Config:
    """Kimi-K3's sizes."""
    raw = (resources.files("kimi_k3.checkpoint") / FILE).read_bytes()
    return parse_config(raw, where=FILE)
