# SPDX-License-Identifier: Apache-2.0
"""Stands for vLLM: prints its lines, reports through the journal, answers HTTP, and fails as told.

``fake_engine.py BEHAVIOURS ARGV...``: behaviours are words joined by commas, argv is vLLM's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kimi_k3.journal.models import (
    FailureRecord,
    Loading,
    PhaseChange,
    ProjectionConversion,
    RankRecord,
    SupervisorRecord,
    failure_file,
    rank_file,
)
from kimi_k3.journal.reader import read_journal
from kimi_k3.journal.writer import now, write_record
from kimi_k3.words.environment import EngineEnvironment
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import Projection, Requantisation, Weights

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
METRICS = 'vllm:num_requests_running{engine="0",model_name="kimi-k3"} 0\n'
"""Of an engine that has nothing to do."""

STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('stubborn', flush=True); "
    "time.sleep(600)",
]


def main() -> None:
    behaviours = set(sys.argv[1].split(","))
    arguments = sys.argv[2:]
    if "ignores-sigterm" in behaviours:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "stubborn-grandchild" in behaviours:
        _await_stubborn(subprocess.Popen(STUBBORN, stdout=subprocess.PIPE, start_new_session=True))
    if "nameless-grandchild" in behaviours:
        _await_stubborn(subprocess.Popen(STUBBORN, stdout=subprocess.PIPE, env={}))
    if "prints-key" in behaviours:
        say(f"INFO non-default args: {{'api_key': '{os.environ['VLLM_API_KEY']}'}}")
    load(behaviours)
    say("INFO init engine (profile, create kv cache, warmup model) took 1.00 s")
    if "--headless" in arguments:
        compute(behaviours)
    serve(arguments[arguments.index("--host") + 1], int(arguments[arguments.index("--port") + 1]), behaviours)


def compute(behaviours: set[str]) -> None:
    """What a node without an API does until it is told to stop."""
    if "dies-serving" in behaviours:
        time.sleep(1.0)
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.1)


def _await_stubborn(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    process.stdout.readline()


def say(line: str) -> None:
    print(line, flush=True)


def load(behaviours: set[str]) -> None:
    told = EngineEnvironment.read()
    assert told.state_dir is not None
    assert told.start_id is not None
    asked = SupervisorRecord.model_validate_json((told.state_dir / "supervisor.json").read_bytes())
    say("\rLoading safetensors checkpoint shards:   0% Completed | 0/3 [00:00<?, ?it/s]")
    if "shuts-down" in behaviours:
        print("(EngineCore pid=7) INFO [shutdown] Executor: waiting for worker exit count=1", flush=True)
    if "hangs-loading" in behaviours:
        time.sleep(600)
    if "dies-loading" in behaviours:
        say("Traceback (most recent call last):")
        say('  File "engine.py", line 1, in load')
        say("(Worker_TP0 pid=7) ValueError: the shard is not what it seems")
        say("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        sys.exit(1)
    if "out-of-memory" in behaviours:
        os.kill(os.getpid(), signal.SIGKILL)
    if "reports-failure" in behaviours:
        failure = FailureRecord(
            start_id=told.start_id,
            pid=os.getpid(),
            at=now(),
            what="layer 3: the kernel is not there",
            remedy="install it",
        )
        write_record(told.state_dir, failure_file(os.getpid()), failure)
        say("ValueError: something vague")
        if "but-lives" in behaviours:
            time.sleep(600)
        sys.exit(1)
    if asked.nodes > 1 and not asked.headless:
        _await_others(told.state_dir, asked)
    if "dies-after-others" in behaviours:
        say("RuntimeError: the shard is not what it seems")
        sys.exit(1)
    for behaviour in behaviours & set(SLOW):
        SLOW[behaviour](asked, told)
    if "no-ranks" not in behaviours:
        for rank in asked.ranks_here:
            report_rank(rank, asked, told, behaviours)
    say("INFO Loading weights took 0.10 seconds")
    say("INFO Model loading took 0.1 GiB memory and 0.200000 seconds")


def _await_others(state_dir: Path, asked: SupervisorRecord) -> None:
    """As vLLM, whose ranks load together: until those of the other nodes have, or should have reported."""
    others = [rank for rank in range(asked.world_size) if rank not in asked.ranks_here]
    while True:
        seen = read_journal(state_dir)
        reported = {rank.rank for rank in seen.ranks}
        loaded = {
            node.node
            for node in seen.nodes
            if node.supervisor.ending is None and node.supervisor.phase.position >= Phase.COMPILING.position
        }
        if reported >= set(others) or len(loaded) == asked.nodes - 1:
            return
        time.sleep(0.1)


def report_rank(rank: int, asked: SupervisorRecord, told: EngineEnvironment, behaviours: set[str]) -> None:
    assert told.state_dir is not None
    weights = Weights.MXFP4 if "serves-mxfp4" in behaviours else asked.weights
    keys = [(layer, projection) for layer in asked.moe_layers_of(rank) for projection in Projection]
    if "missing-conversion" in behaviours:
        keys.pop()
    pid = os.getpid()
    if "worker-dies" in behaviours:
        worker = subprocess.Popen(["true"])
        worker.wait()
        pid = worker.pid
    record = RankRecord(
        start_id=asked.start_id,
        rank=rank,
        pid=pid,
        updated_at=now(),
        weights=weights,
        requantisation=_requantised(told, behaviours) if weights is Weights.INT4 else None,
        phases=(PhaseChange(phase=Phase.LOADING, at=now()), PhaseChange(phase=Phase.CONVERTING, at=now())),
        conversions=tuple(
            conversion(layer, projection, loss=0.1 if "loses-much" in behaviours else 0.0045)
            for layer, projection in keys
        )
        if weights is Weights.INT4
        else (),
    )
    write_record(told.state_dir, rank_file(rank), record)


def load_slowly(asked: SupervisorRecord, told: EngineEnvironment) -> None:
    """A hundredth every second."""
    for done in range(100):
        _report_first_rank(
            asked, told, Loading(bytes_done=done, bytes_total=100, shards_done=0, shards_total=3)
        )
        time.sleep(1)


def stop_loading(asked: SupervisorRecord, told: EngineEnvironment) -> None:
    """A third is read, and then storage answers no more."""
    _report_first_rank(asked, told, Loading(bytes_done=33, bytes_total=100, shards_done=1, shards_total=3))
    time.sleep(600)


def stop_converting(asked: SupervisorRecord, told: EngineEnvironment) -> None:
    """Everything is read, one projection is converted, and no more."""
    everything = Loading(bytes_done=100, bytes_total=100, shards_done=3, shards_total=3)
    first = conversion(asked.moe_layers_of(0)[0], Projection.W13)
    _report_first_rank(asked, told, everything, first)
    time.sleep(600)


SLOW = {"loads-slowly": load_slowly, "stops-loading": stop_loading, "stops-converting": stop_converting}


def _report_first_rank(
    asked: SupervisorRecord, told: EngineEnvironment, loading: Loading, *converted: ProjectionConversion
) -> None:
    assert told.state_dir is not None
    phases = (Phase.LOADING, Phase.CONVERTING) if converted else (Phase.LOADING,)
    record = RankRecord(
        start_id=asked.start_id,
        rank=0,
        pid=os.getpid(),
        updated_at=now(),
        weights=asked.weights,
        requantisation=told.requantisation if asked.weights is Weights.INT4 else None,
        phases=tuple(PhaseChange(phase=phase, at=now()) for phase in phases),
        loading=loading,
        conversions=converted,
    )
    write_record(told.state_dir, rank_file(0), record)


def _requantised(told: EngineEnvironment, behaviours: set[str]) -> Requantisation:
    negative = told.requantisation.negative_scale and "positive-scales" not in behaviours
    return told.requantisation.model_copy(update={"negative_scale": negative})


def conversion(layer: int, projection: Projection, *, loss: float = 0.0045) -> ProjectionConversion:
    return ProjectionConversion(
        layer=layer,
        projection=projection,
        started_at=now(),
        ended_at=now(),
        experts=16,
        bytes_read=1,
        bytes_written=1,
        groups=1,
        lossless_groups=0,
        zero_groups=0,
        nonfinite_groups=0,
        clamped_groups=0,
        squared_error=loss,
        energy=1.0,
        max_error=0.1,
        worst_expert=0,
        worst_expert_relative_mse=0.005,
    )


def serve(host: str, port: int, behaviours: set[str]) -> None:
    answered: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/load":
                self._answer(200, {"server_load": 1})
            elif self.path == "/metrics" and "tells-metrics" in behaviours:
                self._answer(200, METRICS, content_type="text/plain; version=0.0.4")
            else:
                self._answer(200, {})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if "hangs-first" in behaviours or ("hangs-serving" in behaviours and answered):
                time.sleep(600)
            answered.append(self.path)
            if self.headers["Authorization"] != _wanted():
                self._answer(401, {"error": "Unauthorized"})
            elif "first-request-500" in behaviours:
                self._answer(500, {"error": "kernel not found"})
            elif "no-tokens" in behaviours:
                self._answer(200, {"usage": {"completion_tokens": 0}})
            else:
                self._answer(200, {"usage": {"completion_tokens": 4}})
                if "dies-serving" in behaviours:
                    time.sleep(1)
                    say("torch.OutOfMemoryError: HIP out of memory. Tried to allocate")
                    os._exit(1)

        def _answer(self, status: int, body: object, content_type: str = "application/json") -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    say(f"INFO Starting vLLM server on http://{host}:{port}")
    if "ignores-sigterm" not in behaviours:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.serve_forever()


def _wanted() -> str | None:
    key = os.environ.get("VLLM_API_KEY")
    return f"Bearer {key}" if key else None


if __name__ == "__main__":
    assert Path(__file__).exists()
    main()
