# SPDX-License-Identifier: Apache-2.0
"""vLLM's processes without vLLM: an API server, an engine core and workers, each phase as long as told.

``fake_group.py PLAN``: a JSON file with what to do. Only the standard library, so that many start at once;
records of ranks come ready-made in the plan. The core and the workers are ``sleep`` under vLLM's titles:
they do what hung processes do, nothing, and do not end when their parent does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANSWER = json.dumps({"usage": {"completion_tokens": 4}}).encode()


def main() -> None:
    plan_file = Path(sys.argv[1])
    plan = json.loads(plan_file.read_text())
    members = [_titled("VLLM::EngineCore", plan_file.parent)]
    signal.signal(signal.SIGTERM, lambda *_: _end(members, plan))
    members += [_titled(f"VLLM::Worker_TP{rank}", plan_file.parent) for rank in range(len(plan["ranks"]))]
    _tell_pids(plan, members)
    if plan["attentive"]:
        threading.Thread(target=_follow, args=(members,), daemon=True).start()
    print("INFO Starting to load model", flush=True)
    for number, line in enumerate(plan["lines"], start=1):
        for rank, (record, worker) in enumerate(zip(plan["ranks"], members[1:], strict=True)):
            _write(plan, rank, record | {"pid": worker.pid, "phases": record["phases"][:number]})
        time.sleep(plan["phase_seconds"])
        print(line, flush=True)
        while number == plan["hold"] and not Path(plan["go"]).exists():
            time.sleep(0.05)
    for summary in plan["summaries"]:
        print(summary, flush=True)
    _serve(plan)


def _titled(title: str, directory: Path) -> subprocess.Popen[bytes]:
    # The kernel's name of a process, too, is the title, or its beginning: that of the file executed.
    path = directory / title
    path.symlink_to("/bin/sleep")
    return subprocess.Popen([title, "600"], executable=path)


def _tell_pids(plan: dict[str, Any], members: list[subprocess.Popen[bytes]]) -> None:
    path = Path(plan["pids"])
    path.with_suffix(".new").write_text(json.dumps([os.getpid(), *(member.pid for member in members)]))
    path.with_suffix(".new").rename(path)


def _write(plan: dict[str, Any], rank: int, record: dict[str, Any]) -> None:
    directory = Path(plan["state_dir"])
    path = directory / f".rank-{rank:04d}.json.new"
    # A full disk must not end an engine.
    try:
        path.write_text(json.dumps(record))
        path.rename(directory / f"rank-{rank:04d}.json")
    except OSError:
        return


def _follow(members: list[subprocess.Popen[bytes]]) -> None:
    """As vLLM's monitors: whoever is gone takes the others along."""
    while all(member.poll() is None for member in members):
        time.sleep(0.1)
    print("ERROR Engine core proc EngineCore died unexpectedly, shutting down client.", flush=True)
    for member in members:
        member.kill()
    os._exit(1)


def _end(members: list[subprocess.Popen[bytes]], plan: dict[str, Any]) -> None:
    time.sleep(plan["drain_seconds"])
    for member in members:
        member.kill()
    os._exit(0)


def _serve(plan: dict[str, Any]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(ANSWER)

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", plan["port"]), Handler)
    print("INFO Starting vLLM server on http://127.0.0.1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
