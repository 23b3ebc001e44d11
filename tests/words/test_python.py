# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
from pathlib import Path

from kimi_k3.words.python import python_module

SPAWN = """
import multiprocessing

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


def test_the_current_directory_holds_no_modules(tmp_path: Path) -> None:
    """A file of the operator's may bear a module's name, for the process itself and for what it spawns."""
    for name in ("json", "multiprocessing", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the current directory')")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "spawning.py").write_text(SPAWN)
    ran = subprocess.run(
        python_module("spawning"),
        cwd=tmp_path,
        env={"PYTHONPATH": str(elsewhere)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "spawned\n", "")
