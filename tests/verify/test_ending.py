# SPDX-License-Identifier: Apache-2.0
"""Ending a verification by a signal: at once, with nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kimi_k3.verify.keeping import read_results
from tests.surroundings import SURROUNDINGS
from tests.verify.openai_server import PATIENCE_SECONDS, silent, until

CHILDREN = {
    "kernel": "from kimi_k3.verify import kernel as room; room.MODULE = 'sleeper'\n"
    "list(room._ask(room.REDUCED, {}))",
    "bench": "import os, sys; from kimi_k3.verify import bench as room\n"
    "room._run([sys.executable, '-m', 'sleeper'], os.environ, 2, None)",
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["accuracy", "long"])
def test_a_signal_does_not_wait_for_answers(kind: str, number: int, tmp_path: Path) -> None:
    """A silent server has ten minutes for its answer; whoever presses Ctrl-C has not."""
    with silent() as server:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kimi_k3",
                "verify",
                kind,
                "--no-sidecar",
                "--engine",
                server.url,
                "--out",
                str(tmp_path),
            ],
            env=SURROUNDINGS,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        until(lambda: any("prompt" in body or "messages" in body for body in server.asked))
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    (result,) = read_results(tmp_path)
    assert result.broken_off is not None
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_killed_verification_takes_its_process_along(kind: str, tmp_path: Path) -> None:
    """A benchmark that nobody waits for would load the server for hours, a kernel's process hold its GPU."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(3600)\n")
    room = Path(__file__).parents[2] / "service"
    parent = subprocess.Popen(
        [sys.executable, "-c", CHILDREN[kind]],
        cwd=tmp_path,
        env=SURROUNDINGS | {"PYTHONPATH": f"{room}{os.pathsep}{tmp_path}"},
    )
    try:
        until(lambda: bool(psutil.Process(parent.pid).children()))
        (child,) = psutil.Process(parent.pid).children()
        until(lambda: "sleeper" in " ".join(child.cmdline()))
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs([child], timeout=PATIENCE_SECONDS)
    for process in alive:
        process.kill()
    assert alive == []
