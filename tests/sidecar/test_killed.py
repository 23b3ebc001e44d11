# SPDX-License-Identifier: Apache-2.0
"""A killed sidecar loses nothing: all is in the state directory, and the next one tells the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kimi_k3.journal.writer import now
from kimi_k3.words.phases import Phase
from tests.ports import free_port
from tests.surroundings import SURROUNDINGS

from .builders import journal, lossy, phases, write
from .engine import FakeEngine
from .serving import wait_until

ACKNOWLEDGE = "/warnings/lossy-weights/acknowledgement"


@contextlib.contextmanager
def sidecar(state_dir: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own, which answers; it may be killed in the block."""
    child = subprocess.Popen(
        [sys.executable, "-m", "kimi_k3", "sidecar", "--state-dir", state_dir, "--port", str(port)],
        env=SURROUNDINGS,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: alive(port), seconds=30)
        yield child
    finally:
        child.kill()
        child.wait()


def alive(port: int) -> bool:
    """Whether it answers."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/livez", trust_env=False).is_success
    return False


def acknowledge(url: str, stop: threading.Event, kept: list[str]) -> None:
    """Acknowledge again and again, each time as somebody else, until nobody answers."""
    number = 0
    while not stop.is_set():
        name = f"user {number}"
        with contextlib.suppress(httpx.TransportError):
            if httpx.post(url + ACKNOWLEDGE, json={"by": name}, trust_env=False).is_success:
                kept.append(name)
        number += 1


def killed_while_writing(state_dir: Path, wait_seconds: float) -> int:
    """Kill a sidecar that writes acknowledgements; the number of the last one that it said was kept."""
    port = free_port()
    stop, kept = threading.Event(), list[str]()
    with sidecar(state_dir, port) as child:
        asking = threading.Thread(target=acknowledge, args=(f"http://127.0.0.1:{port}", stop, kept))
        asking.start()
        wait_until(lambda: len(kept) > 1)
        threading.Event().wait(wait_seconds)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        stop.set()
        asking.join()
    return int(kept[-1].split()[1])


@pytest.mark.parametrize(
    "phase", [each for each in Phase if Phase.LOADING.position <= each.position <= Phase.DRAINING.position]
)
def test_killed_in_every_phase(tmp_path: Path, engine: FakeEngine, phase: Phase) -> None:
    """kill -9 in the middle of writing: no half acknowledgement, no other phase, never ready by mistake."""
    seen = lossy()
    assert seen.supervisor is not None
    canary = seen.supervisor.canary if phase is Phase.READY else None
    changes = {"phases": phases(phase), "engine_url": engine.url, "canary": canary, "updated_at": now()}
    write(tmp_path, journal(seen.supervisor.model_copy(update=changes), *seen.ranks))
    last = killed_while_writing(tmp_path, random.Random(str(phase)).uniform(0, 0.05))
    port = free_port()
    with (
        sidecar(tmp_path, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        assert client.get("/startupz").json()["phase"] == phase
        if phase is Phase.READY:
            wait_until(lambda: client.get("/readyz").is_success)
        else:
            assert client.get("/readyz").status_code == 503
        told = {one["id"]: one["acknowledged"] for one in client.get("/warnings").json()["warnings"]}
        # The last one may have been kept just before it could be said.
        assert told["lossy-weights"]["by"] in (f"user {last}", f"user {last + 1}")
