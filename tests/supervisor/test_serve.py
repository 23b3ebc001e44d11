# SPDX-License-Identifier: Apache-2.0
"""Whole starts with a fake engine: what an operator sees, and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from kimi_k3.journal.models import SUPERVISOR_FILE
from kimi_k3.journal.reader import read_journal
from kimi_k3.supervisor.processes import is_running
from kimi_k3.supervisor.signals import SAME_SECONDS
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import ConsentSource

from .conftest import PATIENCE, Running, Starter, assert_nothing_left, processes_in

INT4 = ("--weights", "int4", "--accept-lossy")
ERROR = "kimi-k3: error: "


def failed(running: Running, *, code: int) -> str:
    """The one line of an error; nothing is left behind."""
    exit_code, _, err = running.finish()
    assert exit_code == code, err
    errors = [line for line in err.splitlines() if line.startswith(ERROR)]
    assert len(errors) == 1, err
    assert "Traceback" not in err
    assert_nothing_left(running.state_dir)
    return errors[0].removeprefix(ERROR)


def test_a_start_becomes_ready_and_ends_on_request(start: Starter) -> None:
    """The plain case: phases in order, a canary, exit 0 and an ending in the journal."""
    running = start()
    ready = running.wait_for(Phase.READY)
    assert ready.canary is not None
    assert ready.canary.completion_tokens == 4
    assert ready.engine_pid is not None
    code, out, _ = running.stop()
    assert code == 0
    assert "Starting vLLM server on" in out
    record = running.record()
    assert record is not None
    phases = [change.phase for change in record.phases]
    assert phases == sorted(phases, key=lambda phase: phase.position)
    assert phases[0] is Phase.PREFLIGHT
    assert phases[-2:] == [Phase.DRAINING, Phase.STOPPED]
    assert record.ending is not None
    assert record.ending.exit_code == 0
    assert_nothing_left(running.state_dir)


def test_another_servers_answers_are_not_the_engines(start: Starter) -> None:
    """A server that took the port while the engine loads says that it is well; nobody may believe that."""

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    running = start("hangs-loading")
    running.wait_for(Phase.LOADING)
    with ThreadingHTTPServer(("127.0.0.1", running.port), Stranger) as server:
        answering = threading.Thread(target=server.serve_forever)
        answering.start()
        error = failed(running, code=7)
        server.shutdown()
        answering.join()
    assert f"another process listens on port {running.port}" in error
    record = running.record()
    assert record is not None
    assert [change.phase for change in record.phases] == [Phase.PREFLIGHT, Phase.LOADING, Phase.FAILED]


def test_two_starts_of_one_address_are_told_at_once(start: Starter, tmp_path: Path) -> None:
    """Each with a directory of its own, while neither engine listens yet."""
    first = start("hangs-loading")
    first.wait_for(Phase.LOADING)
    second = start("good", "--state-dir", str(tmp_path / "other"), port=first.port)
    code, _, err = second.finish()
    assert code == 5
    assert f"--port {first.port} on 127.0.0.1: another supervisor's engine" in err
    assert first.stop()[0] == 128 + signal.SIGTERM


def test_int4_is_accepted_when_every_rank_converted_everything(start: Starter) -> None:
    """Consent by the environment, two ranks, the rule that was asked: all must be in the record."""
    running = start(
        "good",
        *("--weights", "int4", "--scale-rule", "amax"),
        environment={"KIMI_K3_ACCEPT_LOSSY": "1"},
    )
    record = running.wait_for(Phase.READY)
    assert record.consent is ConsentSource.ENVIRONMENT
    assert str(record.requantisation) == "scale rule amax"
    assert running.stop()[0] == 0


def test_the_record_is_rewritten_while_nothing_happens(start: Starter) -> None:
    """Readers take an old record for a dead supervisor, so an idle one must still write."""
    running = start()
    first = running.wait_for(Phase.READY).updated_at
    time.sleep(2.2)
    record = running.record()
    assert record is not None
    assert (record.updated_at - first).total_seconds() >= 1


@pytest.mark.parametrize(
    ("behaviours", "arguments", "parts"),
    [
        ("dies-loading", (), ["in phase loading", "ValueError: the shard is not what it seems"]),
        ("out-of-memory", (), ["in phase loading", "out-of-memory killer", "dmesg"]),
        ("reports-failure", (), ["layer 3: the kernel is not there", "install it"]),
        ("reports-failure,but-lives", (), ["layer 3: the kernel is not there"]),
        ("hangs-loading", ("--start-timeout", "2"), ["--start-timeout 2", "in phase loading"]),
        ("hangs-loading,ignores-sigterm", ("--start-timeout", "2"), ["--start-timeout 2"]),
        ("shuts-down,hangs-loading", (), ["in phase loading", "it ends its own processes"]),
        ("no-ranks", (), ["no report of rank 0", "plugin did not run"]),
        ("no-ranks", INT4, ["no report of rank 0"]),
        ("missing-conversion", INT4, ["rank 0 did not convert w2 of layer 7"]),
        ("serves-mxfp4", INT4, ["rank 0 serves mxfp4 weights, int4 was asked"]),
        ("first-request-500", (), ["first completion failed", "HTTP 500", "kernel not found"]),
        ("no-tokens", (), ["without a single token"]),
        ("worker-dies,hangs", (), ["rank 0 (pid ", "is gone"]),
        ("dies-loading,stubborn-grandchild", (), ["the shard is not what it seems"]),
        ("dies-loading,nameless-grandchild", (), ["the shard is not what it seems"]),
        ("dies-serving", (), ["while serving", "GPU's memory is full"]),
    ],
)
def test_a_failing_engine_is_explained_and_cleared_away(
    start: Starter, behaviours: str, arguments: tuple[str, ...], parts: list[str]
) -> None:
    """Every way to fail ends in exit code 7, one line with the reason, and nothing left behind."""
    running = start(behaviours, *arguments)
    line = failed(running, code=7)
    for part in parts:
        assert part in line
    record = running.record()
    assert record is not None
    assert record.phase is Phase.FAILED
    assert record.ending is not None
    assert record.ending.reason == line


def test_a_known_death_is_recorded_and_told_to_kubernetes(start: Starter, tmp_path: Path) -> None:
    """Readers of the journal get the row and the line, and ``kubectl describe`` the reason."""
    message = tmp_path / "termination-log"
    message.touch()
    running = start("dies-serving", environment={"TEST_TERMINATION_LOG": str(message)})
    line = failed(running, code=7)
    record = running.record()
    assert record is not None
    assert record.ending is not None
    assert record.ending.explanation is not None
    assert record.ending.explanation.name == "device-out-of-memory"
    assert record.ending.explanation.text == "torch.OutOfMemoryError: HIP out of memory. Tried to allocate"
    number = record.ending.explanation.line
    assert number is not None
    log = (running.state_dir / "engine.log").read_text().splitlines()
    assert log[number - 1] == record.ending.explanation.text
    told = message.read_text()
    assert told.startswith(line)
    assert "known failure: device-out-of-memory" in told


def test_sigterm_while_starting_says_so(start: Starter) -> None:
    """A probe's kill otherwise looks like a crash of the engine (vllm-project/vllm#17386)."""
    running = start("hangs-loading")
    running.wait_for(Phase.LOADING)
    code, _, err = running.stop()
    assert code == 143
    assert "SIGTERM during loading after" in err
    assert_nothing_left(running.state_dir)


def test_ctrl_c_while_starting_is_clean(start: Starter) -> None:
    """An impatient operator gets no traceback."""
    running = start("hangs-loading")
    running.wait_for(Phase.LOADING)
    code, _, err = running.stop(signal.SIGINT)
    assert code == 130
    assert "Traceback" not in err
    assert_nothing_left(running.state_dir)


def test_an_engine_that_ignores_sigterm_is_killed_after_the_drain(start: Starter) -> None:
    """A drain has an end, also with a grandchild in a session of its own that ignores everything."""
    running = start("ignores-sigterm,stubborn-grandchild", "--drain-timeout", "1")
    running.wait_for(Phase.READY)
    code, _, err = running.stop()
    assert code == 0
    assert "ending it by force" in err
    assert_nothing_left(running.state_dir)


def test_a_second_signal_ends_the_drain(start: Starter) -> None:
    """Whoever asks twice does not want to wait for the drain."""
    running = start("ignores-sigterm", "--drain-timeout", "600")
    running.wait_for(Phase.READY)
    running.process.send_signal(signal.SIGTERM)
    running.wait_for(Phase.DRAINING)
    time.sleep(SAME_SECONDS)
    code, _, err = running.stop()
    assert code == 0
    assert "SIGTERM again" in err
    assert_nothing_left(running.state_dir)


def test_readers_hear_of_the_end_before_the_engine_does(start: Starter) -> None:
    """Endpoints send on for seconds, and vLLM refuses what comes in a drain (vllm-project/vllm#24885)."""
    running = start("good", "--readiness-delay", "3")
    engine = running.wait_for(Phase.READY).engine_pid
    assert engine is not None
    begun = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    running.wait_for(Phase.DRAINING)
    assert httpx.get(f"http://127.0.0.1:{running.port}/health").status_code == 200
    assert running.finish()[0] == 0
    assert time.monotonic() - begun >= 3
    assert_nothing_left(running.state_dir)


def test_a_second_signal_ends_the_delay(start: Starter) -> None:
    """Whoever asks twice waits for nothing, not even for endpoints."""
    running = start("ignores-sigterm", "--readiness-delay", "600")
    running.wait_for(Phase.READY)
    running.process.send_signal(signal.SIGTERM)
    running.wait_for(Phase.DRAINING)
    time.sleep(SAME_SECONDS)
    code, _, err = running.stop()
    assert code == 0
    assert "SIGTERM again" in err
    assert_nothing_left(running.state_dir)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 7), (signal.SIGTERM, 0)])
def test_an_engine_that_ends_in_the_delay(start: Starter, number: signal.Signals, code: int) -> None:
    """Killed, it took requests with it; asked by somebody else, as systemd asks everybody, it drained."""
    running = start("good", "--readiness-delay", "600")
    engine = running.wait_for(Phase.READY).engine_pid
    assert engine is not None
    running.process.send_signal(signal.SIGTERM)
    running.wait_for(Phase.DRAINING)
    os.kill(engine, number)
    assert running.finish()[0] == code
    assert_nothing_left(running.state_dir)


def test_no_delay_before_it_serves(start: Starter) -> None:
    """Nobody sends requests to a start."""
    running = start("hangs-loading", "--readiness-delay", "600")
    running.wait_for(Phase.LOADING)
    assert running.stop()[0] == 143
    assert_nothing_left(running.state_dir)


def test_a_hung_engine_is_ended(start: Starter) -> None:
    """It answers /health and /metrics, says that nothing runs, and answers no request."""
    running = start("hangs-serving", "--hang-timeout", "2")
    running.wait_for(Phase.READY)
    line = failed(running, code=7)
    for part in ("vLLM hangs while serving", "no progress", "--hang-timeout 2"):
        assert part in line
    record = running.record()
    assert record is not None
    assert record.stalled_since is not None


def test_two_starts_on_one_state_directory(start: Starter) -> None:
    """The second one refuses, names the first one, and does not disturb it."""
    first = start()
    first.wait_for(Phase.READY)
    second = start()
    code, _, err = second.finish()
    assert code == 5
    assert f"pid {first.process.pid}" in err
    assert first.wait_for(Phase.READY)
    assert first.stop()[0] == 0


@pytest.mark.parametrize(
    "behaviours",
    ["good", "ignores-sigterm,stubborn-grandchild", "ignores-sigterm,nameless-grandchild"],
)
def test_a_killed_supervisor_does_not_hinder_the_next_start(start: Starter, behaviours: str) -> None:
    """After kill -9 the lock is free, and the engine that lived on is ended: it holds the port."""
    first = start(behaviours)
    engine = first.wait_for(Phase.READY).engine_pid
    assert engine is not None
    first.process.kill()
    first.process.communicate()
    second = start(port=first.port)
    second.wait_for(Phase.READY)
    assert not is_running(engine)
    assert second.stop()[0] == 0
    assert_nothing_left(second.state_dir)


@pytest.mark.parametrize("behaviours", ["good", "ignores-sigterm,stubborn-grandchild"])
def test_a_killed_supervisor_takes_its_engine_along(start: Starter, behaviours: str) -> None:
    """An engine without one holds the GPUs, and readers would go on calling it ready."""
    running = start(behaviours)
    engine = running.wait_for(Phase.READY).engine_pid
    assert engine is not None
    running.process.kill()
    running.process.communicate()
    deadline = time.monotonic() + PATIENCE
    record = running.record()
    # The engine may be gone before its guardian has written why.
    while processes_in(running.state_dir) or record is None or record.phase is not Phase.FAILED:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        record = running.record()
    assert record.ending is not None
    assert record.ending.exit_code == 137
    assert_nothing_left(running.state_dir)


def test_records_of_an_earlier_start_are_removed(start: Starter, state_dir: Path) -> None:
    """A rank's old report must not be taken for the present one, not even by a hasty reader."""
    assert start("reports-failure").finish()[0] == 7
    assert len(read_journal(state_dir).failures) == 1
    running = start()
    running.wait_for(Phase.READY)
    assert read_journal(state_dir).failures == ()
    assert read_journal(state_dir).faults == ()
    assert running.stop()[0] == 0


def test_a_start_tells_how_the_one_before_went(start: Starter) -> None:
    """In a crash loop an operator comes between two starts, and must see why the last one failed."""
    first = start("dies-serving")
    line = failed(first, code=7)
    ended = first.record()
    second = start()
    previous = second.wait_for(Phase.READY).previous
    assert previous is not None
    assert ended is not None
    assert (previous.start_id, previous.ending) == (ended.start_id, ended.ending)
    assert (previous.phase, previous.reached) == (Phase.FAILED, Phase.READY)
    assert previous.ending is not None
    assert previous.ending.reason == line
    assert second.stop()[0] == 0
    third = start()
    previous = third.wait_for(Phase.READY).previous
    assert previous is not None
    assert (previous.phase, previous.reached) == (Phase.STOPPED, Phase.DRAINING)
    assert third.stop()[0] == 0


def test_a_taken_port_is_found_before_the_engine_starts(start: Starter) -> None:
    """vLLM would find out too, minutes later."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = failed(start(port=port), code=5)
    assert f"--port {port}" in line


def test_a_failed_check_is_one_line_and_starts_nothing(start: Starter, state_dir: Path) -> None:
    """The first failure and how many more there are; the journal has it, and no engine ever ran."""
    line = failed(
        start(
            environment={"VLLM_PORT": "tcp://10.0.0.7:8000", "VLLM_PLUGINS": "others"},
        ),
        code=1,
    )
    print(line)
    assert "(and 1 more check" in line
    record = read_journal(state_dir).supervisor
    assert record is not None
    assert record.engine_pid is None
    assert [change.phase for change in record.phases] == [Phase.PREFLIGHT, Phase.FAILED]


def test_a_port_that_kubernetes_set(start: Starter) -> None:
    """vLLM would end with a traceback; here it is a line that says what to do in the pod."""
    line = failed(start(environment={"VLLM_PORT": "tcp://10.0.0.7:8000"}), code=1)
    assert "VLLM_PORT='tcp://10.0.0.7:8000'" in line
    assert "enableServiceLinks: false" in line


def test_a_warning_does_not_hinder_a_start(start: Starter) -> None:
    """It is told in one line, and the start goes on."""
    running = start(environment={"VLLM_ENGINE_CORE_INIT_TIMEOUT": "7200", "TOKENIZERS_PARALLELISM": "true"})
    running.wait_for(Phase.READY)
    code, _, err = running.stop()
    assert code == 0
    told = [line for line in err.splitlines() if line.startswith("kimi-k3: preflight: warn ")]
    assert [line.split(":")[2] for line in told] == [
        " warn environment-without-effect",
        " warn environment-replaced",
    ]


def test_a_state_directory_that_cannot_be(start: Starter, tmp_path: Path) -> None:
    """Below a regular file nothing can be created, not even by root."""
    (tmp_path / "state").write_text("a file")
    code, _, err = start("good", "--state-dir", str(tmp_path / "state" / "below")).finish()
    assert code == 6
    assert str(tmp_path / "state" / "below") in err


@pytest.mark.parametrize("make_it", [False, True])
def test_a_checkpoint_that_is_none(start: Starter, tmp_path: Path, make_it: bool) -> None:
    """A directory that is missing or empty is told by its path, before anything is touched."""
    path = tmp_path / "none"
    if make_it:
        path.mkdir()
    line = failed(start(path=path), code=4)
    assert str(path) in line
    assert not (tmp_path / "state").exists()


def test_int4_without_consent(start: Starter, state_dir: Path) -> None:
    """Exit code 3, and the text says what is lost, how much, and what the lossless way is."""
    line = failed(start("good", "--weights", "int4"), code=3)
    for part in ("routed experts", "int4", "0.004", "--accept-lossy", "--weights mxfp4"):
        assert part in line
    assert not state_dir.exists()


def test_the_key_is_nowhere(start: Starter, tmp_path: Path, state_dir: Path) -> None:
    """Neither argv, output, log nor journal may hold the key, even when the engine prints it."""
    key = "sk-correct-horse-battery"
    file = tmp_path / "key"
    file.write_text(key + "\n")
    running = start("prints-key", "--api-key-file", str(file))
    running.wait_for(Phase.READY)
    arguments = b"".join(
        (Path("/proc") / str(pid) / "cmdline").read_bytes()
        for pid in [running.process.pid, *processes_in(state_dir)]
    )
    assert key.encode() not in arguments
    code, out, err = running.stop()
    assert code == 0
    assert "'api_key': '***'" in out
    for text in (out, err, *(path.read_text() for path in state_dir.iterdir())):
        assert key not in text


def test_a_key_in_the_environment_reaches_only_the_engine(start: Starter) -> None:
    """The engine wants the key (the canary would fail without it) by vLLM's own variable only."""
    running = start(environment={"KIMI_K3_API_KEY": "sk-correct-horse-battery"})
    pid = running.wait_for(Phase.READY).engine_pid
    names = {entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    assert b"VLLM_API_KEY" in names
    assert b"KIMI_K3_API_KEY" not in names
    assert running.stop()[0] == 0


def test_a_state_directory_lost_while_serving_does_not_end_the_engine(
    start: Starter, state_dir: Path
) -> None:
    """Serving goes on without a journal; the operator is told once."""
    running = start()
    engine = running.wait_for(Phase.READY).engine_pid
    assert engine is not None
    for path in state_dir.iterdir():
        path.unlink()
    state_dir.rmdir()
    time.sleep(2.5)
    assert is_running(engine)
    code, _, err = running.stop()
    assert code == 0
    assert err.count(f"cannot write {SUPERVISOR_FILE}") == 1


def test_dry_run_touches_nothing(start: Starter, state_dir: Path) -> None:
    """It prints the command with its reasons and leaves the machine as it was."""
    code, out, _ = start("good", "--dry-run", environment={"KIMI_K3_API_KEY": "sk-secret"}).finish()
    assert code == 0
    assert "--load-format kimi_k3" in out
    assert "sk-secret" not in out
    assert not state_dir.exists()


def test_output_nobody_reads_does_not_end_the_engine(start: Starter) -> None:
    """A closed pipe on standard output is no reason to stop serving."""
    running = start("hangs-loading")
    running.wait_for(Phase.LOADING)
    assert running.process.stdout is not None
    running.process.stdout.close()
    os.kill(running.process.pid, signal.SIGTERM)
    running.process.stdout = None
    assert running.finish()[0] == 143
