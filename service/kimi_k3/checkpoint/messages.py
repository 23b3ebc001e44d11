# SPDX-License-Identifier: Apache-2.0
"""What this room says about foreign files: on one line, and harmless to the terminal that shows it."""

from __future__ import annotations

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.text import printable


def bad_checkpoint(what: str, remedy: str) -> OperatorError:
    """The error for a checkpoint that cannot be used; ``what`` may hold foreign text."""
    return OperatorError(printable(what), remedy=remedy, exit_code=ExitCode.BAD_CHECKPOINT)
