# SPDX-License-Identifier: Apache-2.0
"""The commands as processes: signals, terminals, exit codes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_k3.errors import ExitCode
from tests.surroundings import SURROUNDINGS

from .doubles import Double

SERVICE = Path(__file__).parents[2] / "service"


def command(double: Double, checkpoint: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Argv and environment."""
    argv = [sys.executable, "-m", "kimi_k3", "kernels", *arguments, str(checkpoint), "--profile", "tp8"]
    argv += ["--arch", "gfx942", "--cache-dir", str(checkpoint.parent / "cache")]
    path = os.pathsep.join((str(SERVICE), str(double.site)))
    return argv, {**SURROUNDINGS, "PYTHONPATH": path, "AITER_FLYDSL_AOT_WORKERS": "2"}


def running(cache: Path) -> Iterator[int]:
    """Processes that compile into a directory below ``cache``."""
    mark = f"FLYDSL_RUNTIME_CACHE_DIR={cache}".encode()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                found = mark in (each / "environ").read_bytes()
                ended = (each / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except OSError:
                continue
            if found and not ended:
                yield int(each.name)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_ends_all_of_it(double: Double, checkpoint: Path, number: signal.Signals, code: int) -> None:
    """AITER's workers get it, too; none goes on compiling, and nothing half-written stays."""
    double.behave(hang=["moe2_abf16_wint4_bf16_t32x128x128_atomic"])
    argv, environment = command(double, checkpoint, "build")
    cache = checkpoint.parent / "cache"
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        deadline = time.monotonic() + 60
        while not double.hanging.exists():
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert list(running(cache))
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert "Traceback" not in err
    # They were killed before the command ended; the kernel may still be clearing them away.
    deadline = time.monotonic() + 60
    while left := list(running(cache)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not list(cache.glob("*/*/.*"))
    assert list(cache.glob("*/*/*.pkl"))


def test_a_killed_build_leaves_the_lock(double: Double, checkpoint: Path) -> None:
    """The kernel frees it, so the next build needs no cleaning up."""
    double.behave(hang=["_t16x"])
    argv, environment = command(double, checkpoint, "build")
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        deadline = time.monotonic() + 60
        while not double.hanging.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.kill()
    for pid in running(checkpoint.parent / "cache"):
        os.kill(pid, signal.SIGKILL)
    double.behave()
    assert subprocess.run(argv, env=environment, capture_output=True).returncode == ExitCode.OK


def test_on_a_terminal(double: Double, checkpoint: Path) -> None:
    """A bar there, and nothing but the document where a program reads."""
    argv, environment = command(double, checkpoint, "build", "--json")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        argv, env={**environment, "TERM": "xterm"}, stdout=subprocess.PIPE, stderr=theirs
    ) as child:
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:
                break
            if not chunk:
                break
            shown += chunk
        assert child.stdout is not None
        out = child.stdout.read()
    os.close(ours)
    assert child.returncode == ExitCode.OK
    assert out.startswith(b'{\n "schema_version": 1')
    assert b"compiling" in shown
    assert b"\x1b[" in shown


def test_without_aiter(checkpoint: Path) -> None:
    """Not possible here: code 2 and one line, of both commands."""
    for which in ("build", "check"):
        argv = [sys.executable, "-m", "kimi_k3", "kernels", which, str(checkpoint)]
        found = subprocess.run(
            argv, env={**SURROUNDINGS, "PYTHONPATH": str(SERVICE)}, capture_output=True, text=True
        )
        assert found.returncode == ExitCode.USAGE
        assert found.stderr.startswith("kimi-k3: error: no kernel can be compiled without aiter and flydsl")
        assert len(found.stderr.splitlines()) == 1
