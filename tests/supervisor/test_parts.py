# SPDX-License-Identifier: Apache-2.0
"""The supervisor's edges one by one: lock, log, processes, canary."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import SUPERVISOR_FILE, CheckpointSummary, Notice, SupervisorRecord
from kimi_k3.journal.reader import read_journal
from kimi_k3.journal.writer import now, write_record
from kimi_k3.supervisor import logfile
from kimi_k3.supervisor.canary import ATTEMPTS, ask_canary
from kimi_k3.supervisor.leftovers import clear_leftovers
from kimi_k3.supervisor.lock import hold_address, hold_lock
from kimi_k3.supervisor.logfile import EARLIER_LOG_FILE, LOG_FILE, EngineLog
from kimi_k3.supervisor.outlet import Outlet
from kimi_k3.supervisor.processes import Mark, end_processes, is_running, processes_of
from kimi_k3.supervisor.redact import Secrets
from kimi_k3.supervisor.run import supervise
from kimi_k3.supervisor.signals import SAME_SECONDS, received_signals
from kimi_k3.supervisor.start import Start
from kimi_k3.words import environment as names
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import Weights
from tests.supervisor.test_pure import asked
from tests.surroundings import SURROUNDINGS

OK = {"usage": {"completion_tokens": 3}}


def test_a_lock_is_held_once_and_freed(tmp_path: Path) -> None:
    """The second holder learns the first one's pid; the file that stays says nothing afterwards."""
    with hold_lock(tmp_path):
        with pytest.raises(OperatorError, match=f"pid {os.getpid()}") as caught, hold_lock(tmp_path):
            pass
        assert caught.value.exit_code is ExitCode.IN_USE
    assert (tmp_path / "lock").read_text() == ""
    with hold_lock(tmp_path):
        pass


def test_an_address_is_held_once_and_freed() -> None:
    """vLLM listens half an hour after its start began; another one of the same address learns it at once."""
    with hold_address("127.0.0.1", 1):
        with pytest.raises(OperatorError, match="another supervisor") as caught, hold_address("127.0.0.1", 1):
            pass
        assert caught.value.exit_code is ExitCode.IN_USE
        with hold_address("127.0.0.2", 1), hold_address("127.0.0.1", 2):
            pass
    with hold_address("127.0.0.1", 1):
        pass


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    """An engine that outlives its supervisor must not keep the state directory locked."""
    with hold_lock(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with hold_lock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_the_log_is_bounded(tmp_path: Path) -> None:
    """A server that runs for months must not fill the disk; the last lines are always there."""
    log = EngineLog(tmp_path, report=pytest.fail, max_bytes=100)
    for number in range(100):
        log.write(f"line {number}")
    log.close()
    files = [tmp_path / LOG_FILE, tmp_path / EARLIER_LOG_FILE]
    assert all(file.stat().st_size <= 100 for file in files)
    assert files[0].read_text().endswith("line 99\n")


def test_the_log_of_the_last_start_is_kept(tmp_path: Path) -> None:
    """A restart must not destroy why the last start failed."""
    for text in ("first", "second"):
        log = EngineLog(tmp_path, report=pytest.fail)
        log.write(text)
        log.close()
    assert (tmp_path / EARLIER_LOG_FILE).read_text() == "first\n"


def test_a_log_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    """A full disk is no reason to stop serving, nor to say so with every line."""
    told: list[str] = []
    log = EngineLog(tmp_path / "none", report=told.append)
    log.write("a")
    log.close()
    assert len(told) == 1
    log = EngineLog(tmp_path, report=told.append, max_bytes=10)
    assert log._stream is not None
    log._stream.close()
    with Path("/dev/full").open("w") as full:
        log._stream = full
        log.write("a")
        log.write("b")
        log.close()
    assert len(told) == 2


def fake_process(
    proc: Path, pid: int, *, start: str = "", directory: str = "", session: int = 1, began: int = 0
) -> None:
    """A process that began ``began`` seconds after the machine."""
    (proc / str(pid)).mkdir()
    variables = f"X=1\0KIMI_K3_START_ID={start}\0KIMI_K3_STATE_DIR={directory}\0"
    (proc / str(pid) / "environ").write_text(variables if start else "")
    ticks = began * os.sysconf("SC_CLK_TCK")
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b) S 0 {pid} {session} {'0 ' * 15}{ticks} 0")


def test_processes_are_found_by_start_and_directory(tmp_path: Path) -> None:
    """Both must match; another state directory on the same machine is somebody else's."""
    fake_process(tmp_path, 1, start="s1", directory="/a")
    fake_process(tmp_path, 2, start="s2", directory="/a")
    fake_process(tmp_path, 3, start="s1", directory="/b")
    (tmp_path / "self").mkdir()
    assert processes_of(Mark("s1", Path("/a")), proc=tmp_path) == (1,)


def test_processes_that_wrote_over_their_environment(tmp_path: Path) -> None:
    """vLLM's workers do; their session tells, unless it began after the engine was last seen."""
    boot = datetime(2026, 11, 30, tzinfo=UTC)
    (tmp_path / "stat").write_text(f"cpu 1 2\nbtime {int(boot.timestamp())}\n")
    fake_process(tmp_path, 7, session=5, began=100)
    fake_process(tmp_path, 8, session=5, began=300)
    fake_process(tmp_path, 9, session=6, began=100)
    mark = Mark("s1", Path("/a"), session=5, seen=boot + timedelta(seconds=200))
    assert processes_of(mark, proc=tmp_path) == (7,)
    assert processes_of(Mark("s1", Path("/a"), session=5), proc=tmp_path) == (7, 8)
    assert processes_of(Mark("s1", Path("/a")), proc=tmp_path) == ()


def test_a_zombie_does_not_run(tmp_path: Path) -> None:
    """It is in the table of processes and holds nothing."""
    fake_process(tmp_path, 1, session=5)
    assert is_running(1, proc=tmp_path)
    assert not is_running(4, proc=tmp_path)
    (tmp_path / "1" / "stat").write_text("1 (a) b) Z 0 1 5 0 0")
    assert not is_running(1, proc=tmp_path)
    assert processes_of(Mark("s1", Path("/a"), session=5), proc=tmp_path) == ()


def test_processes_are_ended(tmp_path: Path) -> None:
    """Those that ignore SIGTERM are killed after the grace."""
    ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    environment = {**SURROUNDINGS, "KIMI_K3_START_ID": "s-test", "KIMI_K3_STATE_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", ignore], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found, left = end_processes(Mark("s-test", tmp_path), grace=0.1)
        assert found == (process.pid,)
        assert left == ()
    assert process.returncode == -9


def canary(*answers: httpx.Response | Exception) -> tuple[int, list[httpx.Request]]:
    """Tokens of the canary and the requests it took."""
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        answer = answers[min(len(requests), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        found = ask_canary(
            "http://engine",
            "k3",
            api_key="sk-horse",
            timeout=1,
            pause=0,
            transport=httpx.MockTransport(handle),
        )
    except OperatorError as error:
        error.add_note(str(len(requests)))
        raise
    return found.completion_tokens, requests


def test_a_canary_sends_the_key() -> None:
    """Without it every start with a key would fail."""
    tokens, requests = canary(httpx.Response(200, json=OK))
    assert tokens == 3
    assert requests[0].headers["Authorization"] == "Bearer sk-horse"


@pytest.mark.parametrize("first", [httpx.ConnectError("refused"), httpx.Response(503)])
def test_a_canary_tries_again(first: httpx.Response | Exception) -> None:
    """A server that has just begun to listen may stumble once."""
    assert canary(first, httpx.Response(200, json=OK))[0] == 3


@pytest.mark.parametrize(
    ("answer", "part", "requests"),
    [
        (httpx.Response(401, text="bad key sk-horse"), "HTTP 401: bad key ***", 1),
        (httpx.Response(404, text="no model"), "HTTP 404: no model", 1),
        (httpx.Response(500, text="kernel"), "HTTP 500: kernel", ATTEMPTS),
        (httpx.ReadTimeout("too late"), "ReadTimeout", ATTEMPTS),
        (httpx.Response(200, text="hello"), "not a chat completion", 1),
        (httpx.Response(200, json=[]), "not a chat completion", 1),
        (httpx.Response(200, json={"usage": {"completion_tokens": 0}}), "without a single token", 1),
    ],
)
def test_a_canary_that_fails(answer: httpx.Response | Exception, part: str, requests: int) -> None:
    """It says what came instead of a completion, without the key; a 4xx is not tried again."""
    with pytest.raises(OperatorError) as caught:
        canary(answer)
    assert part in str(caught.value)
    assert caught.value.exit_code is ExitCode.ENGINE
    assert caught.value.__notes__ == [str(requests)]


def test_signals_become_data_and_ignored_ones_stay_ignored() -> None:
    """Under nohup a closed terminal ends nothing, a doubled signal is one, afterwards all is as before."""
    before = signal.getsignal(signal.SIGTERM)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with received_signals() as received:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
                signal.raise_signal(number)
            assert received == [signal.SIGTERM]
            time.sleep(SAME_SECONDS)
            signal.raise_signal(signal.SIGINT)
            assert received == [signal.SIGTERM, signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, ignored)


def test_the_log_goes_on_when_its_directory_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full disk was cleared, the log is what the next error message sends the operator to."""
    monkeypatch.setattr(logfile, "RETRY_SECONDS", 0.0)
    directory = tmp_path / "state"
    directory.mkdir()
    said: list[str] = []
    log = EngineLog(directory, report=said.append)
    log.write("before")
    log.close()
    directory.rename(tmp_path / "gone")
    directory.touch()
    log = EngineLog(directory, report=said.append)
    log.write("lost")
    log.write("lost, too")
    assert len(said) == 1
    directory.unlink()
    directory.mkdir()
    log.write("after")
    log.close()
    assert (directory / "engine.log").read_text().splitlines()[-1] == "after"
    assert "works again" in said[1]


def test_an_outlet_without_a_reader_is_given_up_quietly() -> None:
    """A closed terminal or a full disk behind stderr must not end a deployment that serves."""
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    outlet = Outlet(stream, prefix="kimi-k3: ", secrets=Secrets(["key"]))
    outlet("the key is hidden")
    assert os.read(reader, 100) == b"kimi-k3: the *** is hidden\n"
    os.close(reader)
    outlet("nobody reads this")
    outlet("nor this")
    stream.close()
    Outlet(None)("a closed stream")


def test_a_running_supervisor_is_not_mistaken_for_a_leftover(tmp_path: Path) -> None:
    """Whoever removes the state directory of a running start must not have it killed by the next one."""
    command = [sys.executable, "-c", "import time; time.sleep(60)", "serve"]
    with subprocess.Popen(command) as running:
        write_record(
            tmp_path, SUPERVISOR_FILE, asked().model_copy(update={"pid": running.pid, "updated_at": now()})
        )
        with pytest.raises(OperatorError, match=f"another supervisor .pid {running.pid}."):
            clear_leftovers(tmp_path, report=lambda _: None)
        running.kill()


def test_a_supervisor_is_not_mistaken_for_the_killed_one_with_its_number(tmp_path: Path) -> None:
    """In a container each supervisor is process 1: after a kill -9 none would ever start again."""
    earlier = asked().model_copy(update={"updated_at": now()}).model_dump_json()
    code = (
        "import os, sys; from pathlib import Path; from kimi_k3.supervisor.leftovers import clear_leftovers\n"
        "directory = Path(sys.argv[1]); text = sys.argv[2].replace('\"pid\":1', f'\"pid\":{os.getpid()}')\n"
        "assert str(os.getpid()) in text; (directory / 'supervisor.json').write_text(text)\n"
        "clear_leftovers(directory, report=print)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), earlier, "serve"]
    assert subprocess.run(command, env=SURROUNDINGS).returncode == 0
    command = [sys.executable, "-c", "import time; time.sleep(60)", "serve"]
    with subprocess.Popen(command) as another:
        died = {"pid": another.pid, "updated_at": now() - timedelta(hours=1)}
        write_record(tmp_path, SUPERVISOR_FILE, asked().model_copy(update=died))
        clear_leftovers(tmp_path, report=lambda _: None)
        assert another.poll() is None
        another.kill()


def test_the_resource_tracker_cleans_up_before_it_is_ended(tmp_path: Path) -> None:
    """Killed together with its clients, it leaves their shared memory in /dev/shm for good."""
    code = (
        "import time\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "print(SharedMemory(create=True, size=1024).name, flush=True)\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    )
    marked = {**SURROUNDINGS, names.START_ID: "tracked", names.STATE_DIR: str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=marked, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        segment = Path("/dev/shm") / client.stdout.readline().strip()
        assert segment.exists()
        _, left = end_processes(Mark("tracked", tmp_path), grace=0.1)
    assert left == ()
    assert not segment.exists()


def test_a_check_that_waits_is_ended_by_a_signal(tmp_path: Path) -> None:
    """Whoever ends a start that waits for GPU memory does not wait, and what was amiss is no reason."""
    begin = time.monotonic()

    def check(pause: Callable[[float], bool]) -> tuple[Notice, ...]:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not pause(60)
        raise OperatorError("the GPUs are in use", remedy="wait")

    moment = now()
    record = SupervisorRecord(
        start_id="t",
        pid=os.getpid(),
        started_at=moment,
        updated_at=moment,
        profile="cpu-tiny",
        checkpoint=CheckpointSummary(
            name="tiny", total_bytes=1, shards=1, decoder_layers=1, moe_layers=(), experts=1
        ),
        served_model_name="kimi-k3",
        weights=Weights.MXFP4,
        requantisation=None,
        consent=None,
        world_size=1,
        engine_url="http://127.0.0.1:1",
    )
    start = Start(
        record=record,
        argv=("never-started",),
        state_dir=tmp_path,
        socket_dir=tmp_path / "sockets",
        environment={},
        api_key=None,
        start_timeout=1,
        drain_timeout=1,
        readiness_delay=0,
        hang_timeout=1,
        checks=(check,),
    )
    lines: list[str] = []
    assert supervise(start, report=lines.append, forward=lines.append) == 143
    assert time.monotonic() - begin < 10
    ended = read_journal(tmp_path).supervisor
    assert ended is not None
    assert ended.ending is not None
    assert ended.phases[-1].phase is Phase.STOPPED
    assert ended.ending.reason == "SIGTERM during the start"
