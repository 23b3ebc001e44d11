# SPDX-License-Identifier: Apache-2.0
"""The command ``kimi-k3``: it only wires rooms together.

Rooms are imported inside the commands, so ``--help`` and a mistyped flag answer at once.
"""

from kimi_k3.cli.application import main, run

__all__ = ["main", "run"]
