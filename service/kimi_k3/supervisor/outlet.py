# SPDX-License-Identifier: Apache-2.0
"""Where lines for the operator go."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO

from kimi_k3.supervisor.redact import Secrets


class Outlet:
    """Prints lines to a stream until nobody reads them any more.

    A reader that has gone, a closed terminal and a full disk must not end a deployment: serving goes
    on, and engine.log still has every line of the engine.
    """

    def __init__(self, stream: TextIO | None, *, prefix: str = "", secrets: Secrets | None = None) -> None:
        self._stream = stream
        self._prefix = prefix
        self._secrets = secrets or Secrets()

    def __call__(self, line: str) -> None:
        if self._stream is None:
            return
        try:
            print(self._prefix + self._secrets.hide(line), file=self._stream, flush=True)
        except (OSError, ValueError):
            self._discard(self._stream)
            self._stream = None

    @staticmethod
    def _discard(stream: TextIO) -> None:
        """Let what is still buffered vanish: Python's flush at exit would turn a clean end into an error."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
