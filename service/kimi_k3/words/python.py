# SPDX-License-Identifier: Apache-2.0
"""How another Python is started."""

from __future__ import annotations

import sys


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module in this Python, without importing from the current directory.

    A flag, not ``PYTHONSAFEPATH``: ``multiprocessing`` hands it on to what it spawns, and the variable would
    also reach the scripts by which AITER generates its kernels, which import modules from beside themselves
    (``csrc/*/gen_instances.py``).
    """
    return (sys.executable, "-P", "-m", module, *arguments)
