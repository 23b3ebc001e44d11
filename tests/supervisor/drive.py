# SPDX-License-Identifier: Apache-2.0
"""The command ``kimi-k3`` with the fake engine in vLLM's place: ``drive.py BEHAVIOURS ARGUMENTS...``.

Patience that only lets a real engine finish its own ending is shortened.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from kimi_k3 import cli
from kimi_k3.preflight import checks
from kimi_k3.supervisor import follow, heartbeat, leader, run, serve

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")

if __name__ == "__main__":
    follow.PATIENCE_SECONDS = 1.0
    run.END_GRACE_SECONDS = 1.0
    heartbeat.INTERVAL_SECONDS, heartbeat.STALL_SECONDS, heartbeat.TIMEOUT_SECONDS = 0.2, 1.0, 1.0
    leader.INTERVAL_SECONDS = 0.2
    vars(follow)["LOST_SECONDS"] = 10.0
    vars(run)["exit_deadline_seconds"] = lambda drain, *, serving: drain if serving else 1.0
    # These tests are about the supervisor: they run where vLLM is not installed, too.
    if message := os.environ.get("TEST_TERMINATION_LOG"):
        vars(serve)["supervise"] = partial(run.supervise, termination_log=Path(message))
    of_start = checks.of_start
    vars(serve)["of_start"] = lambda machine, subject: (
        finding for finding in of_start(machine, subject) if not finding.check.startswith("vllm-version")
    )
    serve.serve = partial(serve.serve, engine_command=(sys.executable, str(FAKE_ENGINE), sys.argv[1]))
    sys.exit(cli.run(sys.argv[2:]))
