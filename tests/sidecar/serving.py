# SPDX-License-Identifier: Apache-2.0
"""The sidecar as it is served, for what a test client hides."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from kimi_k3.sidecar.server import configuration, listen


@contextlib.contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """The URL of ``app`` on a free port."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(configuration(app, grace_seconds=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_until(holds: Callable[[], bool], *, seconds: float = 10) -> None:
    """Wait for a condition; fails when it does not come true in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)
