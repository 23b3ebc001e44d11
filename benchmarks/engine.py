# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs where it only passes things on. Prints rows for RESULTS.md.

``.venv/bin/python -m benchmarks.engine``: the header that says how lossy an answer is, per request and per
chunk of a stream; and the plugin's registration in a process of vLLM on another platform.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.surroundings import SURROUNDINGS
from tests.wheels import vllm_source

from kimi_k3.engine.loss_header import LossHeader

REQUESTS, CHUNKS, REPEATS = 2000, 500, 9
HERE = Path(__file__).parents[1]
IDLE = """
import time
from vllm.platforms import current_platform
current_platform.is_rocm()
began = time.perf_counter()
from kimi_k3.engine.plugin import register
register()
print(time.perf_counter() - began)
"""

App = Callable[[Any, Any, Any], Awaitable[None]]


def application(chunks: int) -> App:
    """Answers each request with so many chunks."""
    start = {"type": "http.response.start", "status": 200}
    body = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
    end = {"type": "http.response.body", "body": b"", "more_body": False}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(dict(start, headers=[(b"content-type", b"text/event-stream")]))
        for _ in range(chunks):
            await send(body)
        await send(end)

    return app


def seconds_per_request(app: App, requests: int) -> float:
    """Of an application that nobody reads from."""

    async def send(message: Any) -> None: ...

    async def ask() -> float:
        began = time.perf_counter()
        for _ in range(requests):
            await app({"type": "http", "path": "/v1/chat/completions", "root_path": ""}, None, send)
        return (time.perf_counter() - began) / requests

    return asyncio.run(ask())


def difference(chunks: int, requests: int) -> float:
    """Seconds that the header adds to a request, median of pairs."""
    plain, with_header = application(chunks), LossHeader(application(chunks))
    return statistics.median(
        seconds_per_request(with_header, requests) - seconds_per_request(plain, requests)
        for _ in range(REPEATS)
    )


def idle_registration() -> list[float]:
    """Seconds of the plugin in a process of vLLM 0.33.0 on a doubled gfx950, five times."""
    path = [HERE / "tests/engine/gfx942/double", vllm_source("0.33.0").parent, HERE / "service"]
    found = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", IDLE],
            env=SURROUNDINGS
            | {"PYTHONPATH": os.pathsep.join(map(str, path)), "DOUBLE_ARCHITECTURE": "gfx950"},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(float(done.stdout.splitlines()[-1]))
    return found


def main() -> None:
    """Print everything."""
    per_request = difference(0, REQUESTS)
    per_chunk = (difference(CHUNKS, REQUESTS // 50) - per_request) / CHUNKS
    idle = idle_registration()
    print("| what | cost |\n|---|---|")
    print(f"| header, per request | {per_request * 1e6:.2f} us |")
    print(f"| header, per chunk of a stream | {per_chunk * 1e6:.3f} us |")
    told = f"{statistics.median(idle) * 1e3:.1f} ms (at most {max(idle) * 1e3:.1f})"
    print(f"| plugin on another platform | {told} |")


if __name__ == "__main__":
    main()
