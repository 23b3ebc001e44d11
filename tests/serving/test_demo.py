# SPDX-License-Identifier: Apache-2.0
"""`kimi-k3 demo` as a newcomer runs it."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.serving.deployment import COMMAND, Family, environment

pytestmark = pytest.mark.engine


def test_demo_answers_a_question_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The first minute decides whether someone stays; the last one whether they trust it on their machine."""
    demo = subprocess.Popen(
        [COMMAND, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(TMPDIR=str(tmp_path)),
        start_new_session=True,
    )
    assert demo.stdout is not None
    shown: list[str] = []
    family = Family(demo.pid)
    try:
        for line in demo.stdout:
            shown.append(line.rstrip())
            if line.startswith("  curl ") and line.rstrip().endswith("/metrics"):
                break
        assert len(shown) > 10, shown
        assert family.look() >= 5, "supervisor, sidecar, API server, EngineCore, worker"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(90) == 0, shown
        assert family.left() == []
    finally:
        family.look()
        demo.kill()
        family.kill()
        demo.wait()
        demo.stdout.close()
    text = "\n".join(shown)
    assert re.search(
        r"^OpenAI API: http://127\.0\.0\.1:\d+/v1 .* http://127\.0\.0\.1:\d+/status$", text, re.M
    )
    for phase in ("loading", "converting", "warming", "ready"):
        assert f"\n{phase}: " in text
    assert re.search(r"^Question: Anna has 12 apples\. ", text, re.M)
    assert re.search(r"^Answer: +12 \+ 7 = 19\n19 - 5 = 14\n#### 14$", text, re.M)
    # torch keeps a cache there, for the next process; nothing else may stay, not even vLLM's sockets.
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []


def test_a_demo_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    """A newcomer sees the supervisor's own message, not that some child ended."""
    result = subprocess.run(
        [COMMAND, "demo", "--weights", "int5"],
        capture_output=True,
        text=True,
        env=environment(TMPDIR=str(tmp_path)),
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "kimi-k3: error: --weights 'int5': there is no such choice; did you mean 'int4'?"
    ]
