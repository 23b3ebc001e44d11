# SPDX-License-Identifier: Apache-2.0
"""The state directory: there, ours and writable."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.environment import STATE_DIR


def check_state_dir(directory: Path) -> None:
    """Create ``directory`` and write to it once.

    Raises:
        OperatorError: it cannot be created or written, or is not a directory.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        raise OperatorError(
            f"state directory {directory}: cannot be created and written: {error.strerror or error}",
            remedy=f"give a writable directory with --state-dir or {STATE_DIR}",
            exit_code=ExitCode.STATE,
        ) from None
