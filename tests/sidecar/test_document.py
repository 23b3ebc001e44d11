# SPDX-License-Identifier: Apache-2.0
"""docs/sidecar.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

from kimi_k3.sidecar.connection import HEAD_SECONDS, MAX_HEAD_BYTES
from kimi_k3.sidecar.events import CONVERTED, KINDS
from kimi_k3.sidecar.guard import BODY_SECONDS, MAX_BODY_BYTES
from kimi_k3.sidecar.server import MAX_CONNECTIONS
from kimi_k3.sidecar.settings import Settings

from .test_app import PATHS

TEXT = (Path(__file__).parents[2] / "docs" / "sidecar.md").read_text()


def test_paths() -> None:
    """An endpoint that nobody can find is not there."""
    rows = set(re.findall(r"^\| `(/\w+[\w.]*)` \|", TEXT, re.MULTILINE))
    assert rows == {*PATHS, "/events", "/openapi.json"}


def test_settings() -> None:
    """Every variable is named with its default."""
    rows = re.findall(r"^\| `([A-Z_]+)`(?:, `([A-Z_]+)`)? \| ([^|]*) \|", TEXT, re.MULTILINE)
    table = {name: default for *names, default in rows for name in names if name}
    assert set(table) == {name.upper() for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        if name not in ("state_dir", "token", "token_file"):
            default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
            assert table[name.upper()].strip("` ").lower() == default.lower()


def test_events_and_limits() -> None:
    """Kinds of events and limits are those of the code."""
    assert all(f"`{name}`" in TEXT for name in (CONVERTED, *(kind.name for kind in KINDS)))
    assert (
        f"headers {MAX_HEAD_BYTES >> 10} KiB and {HEAD_SECONDS:g} s, bodies {MAX_BODY_BYTES >> 10} KiB and "
        f"{BODY_SECONDS:g} s, {MAX_CONNECTIONS} connections"
    ) in TEXT
