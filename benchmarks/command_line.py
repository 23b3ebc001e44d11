# SPDX-License-Identifier: Apache-2.0
"""How long the commands take that an operator waits for, and what a start costs. Prints rows for RESULTS.md.

Run it on an otherwise idle machine: ``.venv/bin/python -m benchmarks.command_line``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoint.imitation import PUBLISHED_CONFIG, PUBLISHED_SHARDS, write_imitation
from tests.serving.deployment import COMMAND, TOY, Mode, environment, started

from kimi_k3.checkpoint import make_tiny_checkpoint

REPEATS = 5


def _run(*arguments: object) -> tuple[float, int]:
    """Seconds, and peak resident set in MiB, of one command."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [COMMAND, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    _, _, usage = os.wait4(child.pid, 0)
    return time.perf_counter() - began, usage.ru_maxrss // 1024


def _row(what: str, *arguments: object) -> None:
    runs = [_run(*arguments) for _ in range(REPEATS)]
    seconds = [run[0] for run in runs]
    print(
        f"| `{what}` | {statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) "
        f"| {max(run[1] for run in runs)} |",
        flush=True,
    )


def _start(checkpoint: Path, directory: Path, mode: Mode) -> None:
    directory.mkdir()
    began = time.perf_counter()
    with started(checkpoint, directory, mode) as deployment:
        ready = time.perf_counter() - began
        began = time.perf_counter()
        tokens = len(deployment.complete(list(range(40)), 200))
        print(f"| {mode} | {ready:.0f} | {tokens / (time.perf_counter() - began):.0f} |", flush=True)


def _prepare(directory: Path) -> None:
    """Write the checkpoints that are measured."""
    make_tiny_checkpoint(directory / "tiny")
    (directory / "empty").mkdir()
    (directory / "published").mkdir()
    write_imitation(directory / "published", PUBLISHED_CONFIG.read_text(), PUBLISHED_SHARDS)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # In a process of its own: a child's peak counts from its parent's.
        subprocess.run([sys.executable, "-m", "benchmarks.command_line", name], check=True)
        print("| command | seconds: median (range) | peak MiB |\n|---|---|---|")
        _row("kimi-k3 --help", "--help")
        _row("kimi-k3 checkpoint show TINY", "checkpoint", "show", directory / "tiny")
        _row("kimi-k3 checkpoint show PUBLISHED-SIZE", "checkpoint", "show", directory / "published")
        _row("kimi-k3 serve EMPTY (refused)", "serve", directory / "empty")
        _row(
            "kimi-k3 serve TINY --weights int4 (no consent)",
            "serve",
            directory / "tiny",
            *TOY,
            "--weights",
            "int4",
        )
        _row("kimi-k3 serve TINY --dry-run", "serve", directory / "tiny", *TOY, "--dry-run")
        print("\n| start | seconds to ready | tokens/s, one request |\n|---|---|---|")
        for mode in (Mode(), Mode(weights="int4"), Mode(weights="int4", ranks=2, expert_parallel=True)):
            _start(directory / "tiny", directory / str(mode), mode)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if sys.argv[1:]:
        _prepare(Path(sys.argv[1]))
    else:
        main()
