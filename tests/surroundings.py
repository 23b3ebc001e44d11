# SPDX-License-Identifier: Apache-2.0
"""The environment in which commands are tried.

Importing vLLM writes variables (``AITER_SITUV2_A4W4`` among them) into the importing process: a command
that a test starts must not inherit what another test imported. ``conftest.py`` loads this module first.
"""

from __future__ import annotations

import os

_OURS = ("KIMI_K3_", "VLLM_", "AITER_")

SURROUNDINGS = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
"""This test run's variables as they were at its start, without those that decide what is served."""
