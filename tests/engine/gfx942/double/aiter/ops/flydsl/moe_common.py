# SPDX-License-Identifier: Apache-2.0
"""aiter/ops/flydsl/moe_common.py"""

from __future__ import annotations

from enum import Enum


class GateMode(str, Enum):  # noqa: UP042  (as AITER's)
    SEPARATED = "separated"
    MOCK_GATE_ONLY = "mock_gate_only"
    GATE_ONLY = "gate_only"
    INTERLEAVE = "interleave"
