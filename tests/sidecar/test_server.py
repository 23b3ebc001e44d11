# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.sidecar.server import listen, run
from kimi_k3.sidecar.settings import Settings

from .builders import journal, supervisor, write
from .engine import FakeEngine
from .serving import wait_until


def test_port_in_use(tmp_path: Path) -> None:
    """The commonest mistake gets one line with the port and the remedy, not a server's log."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OperatorError) as caught:
            run(Settings(state_dir=tmp_path, port=port))
    assert caught.value.exit_code == ExitCode.IN_USE
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "KIMI_K3_SIDECAR_PORT" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "a" * 70, "\u2603" * 80])
def test_host_of_somebody_else(host: str) -> None:
    """An address that is not this machine's is named."""
    with pytest.raises(OperatorError) as caught:
        listen(host, 0)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "KIMI_K3_SIDECAR_HOST" in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_hosts(host: str) -> None:
    """Names and wildcard addresses can be listened on."""
    with listen(host, 0) as listener:
        assert listener.getsockname()[1] > 0


def test_stop_while_the_engine_hangs(tmp_path: Path, engine: FakeEngine) -> None:
    """SIGTERM ends the sidecar within seconds although a probe waits for the engine, without a traceback."""
    engine.mood = "hang"
    write(tmp_path, journal(supervisor(engine_url=engine.url)))
    code = (
        "from pathlib import Path; from kimi_k3.sidecar.server import run;"
        "from kimi_k3.sidecar.settings import Settings;"
        f"run(Settings(state_dir=Path({str(tmp_path)!r}), port=0, engine_timeout_seconds=1))"
    )
    log = tmp_path / "log"
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=stream, stderr=stream)
    try:
        wait_until(lambda: "startup complete" in log.read_text(), seconds=20)
        found = re.search(r"at (http://127\.0\.0\.1:\d+)", log.read_text())
        assert found is not None, log.read_text()
        assert httpx.get(found[1] + "/livez", trust_env=False).status_code == 200
        # Once this has been answered, the poll's own question is over and the next one is the probe's.
        httpx.get(found[1] + "/readyz", trust_env=False, timeout=30)
        asked = engine.asked
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx.get, found[1] + "/readyz", trust_env=False, timeout=30)
            wait_until(lambda: engine.asked > asked)
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (0, -signal.SIGTERM)
            assert time.monotonic() - begun < 15
            assert waiting.result().status_code == 503
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()
