# SPDX-License-Identifier: Apache-2.0
"""The reason of an ending where Kubernetes looks for it: ``kubectl describe pod`` shows it as the message."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from kimi_k3.journal.models import Ending

TERMINATION_LOG = Path("/dev/termination-log")
"""Where Kubernetes mounts the file, unless the pod says otherwise."""

MAX_BYTES = 4096
"""Kubernetes drops what is longer."""


def termination_message(ending: Ending) -> str:
    """The reason and, if the log told it, the line, in at most :data:`MAX_BYTES` bytes of UTF-8."""
    lines = [ending.reason]
    if (known := ending.explanation) is not None:
        lines.append(f"known failure: {known.name}")
        if known.text is not None:
            lines.append(f"line {known.line}: {known.text}")
    return "\n".join(lines).encode(errors="replace")[:MAX_BYTES].decode(errors="ignore")


def write_termination_message(ending: Ending, path: Path) -> None:
    """Write it if the file is there; nothing that goes wrong here may change how the start ends."""
    with contextlib.suppress(OSError):
        # A FIFO without a reader would be waited for, and a device is nobody's message.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, termination_message(ending).encode())
        finally:
            os.close(descriptor)
