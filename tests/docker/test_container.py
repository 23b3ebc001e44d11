# SPDX-License-Identifier: Apache-2.0
"""The engine's image alone, as people start it, and in surroundings that are not as they should be."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kimi_k3.errors import ExitCode
from kimi_k3.journal.models import STALE_AFTER_SECONDS
from tests.certificates import signed
from tests.docker.engine import Docker
from tests.docker.test_images import CPU, SIDECAR

pytestmark = pytest.mark.engine

SHARED_MEMORY = "--shm-size=512m"
CONFINED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
START_SECONDS = 240.0


@contextlib.contextmanager
def started(docker: Docker, *options: str, command: Sequence[str] = (), image: str = CPU) -> Iterator[str]:
    """A container of the image, with its own command unless one is given; gone afterwards."""
    number = docker.run("run", "--detach", *options, image, *command).stdout.strip()
    try:
        yield number
    finally:
        docker.run("rm", "--force", "--volumes", number)


def wait_for(docker: Docker, number: str, holds: Callable[[], bool]) -> None:
    """Wait until it holds, as long as the container runs."""
    end = time.monotonic() + START_SECONDS
    while not holds():
        running = docker.run("inspect", "--format", "{{.State.Running}}", number).stdout.strip()
        if running != "true" or time.monotonic() > end:
            log = docker.run("logs", "--tail", "30", number)
            raise AssertionError(log.stdout + log.stderr)
        time.sleep(0.5)


def becomes_healthy(docker: Docker, number: str) -> None:
    """Wait until its own check says that it serves."""
    status = ("inspect", "--format", "{{.State.Health.Status}}", number)
    wait_for(docker, number, lambda: docker.run(*status).stdout.strip() == "healthy")


def refused(docker: Docker, *options: str, code: ExitCode) -> str:
    """The one line by which a start is refused."""
    done = docker.run("run", "--rm", *options, CPU, check=False, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kimi-k3: error:")]
    return line


def test_any_user(images: Docker) -> None:
    """A number that nobody knows, as OpenShift gives it; the next time another one, on the same volumes."""
    volumes = ("--volume=any-user-state:/state", "--volume=any-user-cache:/cache")
    for user in ("12345:0", "23456:0"):
        with started(images, *CONFINED, SHARED_MEMORY, f"--user={user}", *volumes) as number:
            becomes_healthy(images, number)
            began = time.monotonic()
            images.run("stop", "--time=60", number)
            assert time.monotonic() - began < 40
            assert images.run("inspect", "--format", "{{.State.ExitCode}}", number).stdout.strip() == "0"
    images.run("volume", "rm", "any-user-state", "any-user-cache")


def test_nowhere_to_write(images: Docker) -> None:
    """A container without a /tmp that can be written is told so."""
    assert "--tmpfs /tmp" in refused(images, SHARED_MEMORY, "--read-only", code=ExitCode.FAILED)


def test_little_shared_memory(images: Docker) -> None:
    """Docker's 64 MiB kill vLLM in the middle of its start; here they are refused before."""
    line = refused(images, "--shm-size=64m", code=ExitCode.FAILED)
    assert "/dev/shm has 64 MiB" in line


def test_a_service_called_vllm(images: Docker) -> None:
    """Kubernetes makes VLLM_PORT of it, which vLLM takes for its own."""
    line = refused(images, SHARED_MEMORY, "--env=VLLM_PORT=tcp://1.2.3.4:80", code=ExitCode.FAILED)
    assert "VLLM_PORT" in line


def test_a_volume_of_somebody_else(images: Docker, tmp_path: Path) -> None:
    """A state directory that cannot be written is named."""
    line = refused(images, SHARED_MEMORY, f"--volume={tmp_path}:/state", code=ExitCode.STATE)
    assert "state directory /state" in line


def test_a_state_volume_that_fills_while_starting(images: Docker) -> None:
    """It serves all the same but cannot tell; with room again it is ready, in the same start."""
    volumes = ("--tmpfs=/state:size=8m,mode=1777", "--tmpfs=/cache:mode=1777")
    with started(images, *CONFINED, SHARED_MEMORY, *volumes) as number:
        wait_for(images, number, lambda: "loading: " in images.run("logs", number).stderr)
        assert images.run("exec", number, "dd", "if=/dev/zero", "of=/state/filler", check=False).returncode
        ask = "import urllib.request as web; print(web.urlopen('http://127.0.0.1:8000/health').status)"
        serves = ("exec", number, "python", "-c", ask)
        wait_for(images, number, lambda: images.run(*serves, check=False).stdout.strip() == "200")
        assert "starting" in images.run("exec", number, "kimi-k3", "healthcheck", check=False).stdout
        images.run("exec", number, "rm", "/state/filler")
        becomes_healthy(images, number)


def test_ready_while_the_supervisor_cannot_tell(images: Docker) -> None:
    """A state volume that fills takes no traffic away; a supervisor that hangs does, whatever vLLM says."""
    volumes = ("--tmpfs=/state:size=8m,mode=1777", "--tmpfs=/cache:mode=1777")
    with started(images, *CONFINED, SHARED_MEMORY, *volumes) as number:

        def check() -> tuple[int, str]:
            done = images.run("exec", number, "kimi-k3", "healthcheck", check=False)
            return done.returncode, done.stdout

        becomes_healthy(images, number)
        images.run("exec", number, "dd", "if=/dev/zero", "of=/state/filler", check=False)
        time.sleep(STALE_AFTER_SECONDS + 5)
        assert check() == (0, "ready\n")
        images.run("exec", number, "rm", "/state/filler")
        time.sleep(5)
        assert check() == (0, "ready\n")
        core = "kill -STOP $(grep -l EngineCor /proc/[0-9]*/comm | cut -d/ -f3)"
        images.run("kill", "--signal=STOP", number)
        images.run("exec", number, "sh", "-c", core)
        time.sleep(STALE_AFTER_SECONDS + 5)
        code, why = check()
        assert (code, "no longer reports" in why) == (1, True), why
        images.run("kill", number)


def test_a_secret_stays_one(images: Docker, tmp_path: Path) -> None:
    """The key that clients must send, and a token: in no log, no record, no dump of Docker's."""
    key, token = "canary-key-5b1e", "canary-token-77d0"
    (tmp_path / "key").write_text(key)
    volumes = ("--volume=/state", "--volume=/cache", f"--volume={tmp_path}/key:/run/secrets/key:ro")
    options = (*volumes, f"--env=HF_TOKEN={token}")
    served = ("serve", "/opt/kimi-k3/miniature", "--profile=cpu-tiny", "--api-key-file=/run/secrets/key")
    with started(images, *CONFINED, SHARED_MEMORY, *options, command=served) as number:
        becomes_healthy(images, number)
        ask = (
            "import urllib.request as web, pathlib; key = pathlib.Path('/run/secrets/key').read_text(); "
            "request = web.Request('http://127.0.0.1:8000/v1/models', headers=%s); "
            "print(web.urlopen(request).status)"
        )
        assert "401" in images.run("exec", number, "python", "-c", ask % "{}", check=False).stderr
        with_key = ask % "{'Authorization': 'Bearer ' + key}"
        assert images.run("exec", number, "python", "-c", with_key).stdout.strip() == "200"
        log = images.run("logs", number)
        written = images.run("exec", number, "sh", "-c", "cat /state/*")
        for secret in (key, token):
            assert secret not in log.stdout + log.stderr
            assert secret not in written.stdout
        assert "ready" in written.stdout
        for dump in (images.run("inspect", number), images.run("exec", number, "env")):
            assert key not in dump.stdout


def test_a_killed_container_starts_again(images: Docker) -> None:
    """After kill -9 of all of it, as for want of memory, the next supervisor has its number: 1."""
    record = ("cat", "/state/supervisor.json")

    def start_id(number: str, other_than: str | None = None) -> str:
        end = time.monotonic() + START_SECONDS
        while True:
            done = images.run("exec", number, *record, check=False)
            if done.returncode == 0 and (found := json.loads(done.stdout))["start_id"] != other_than:
                return str(found["start_id"])
            log = images.run("logs", "--tail", "5", number).stderr
            assert "in use by another supervisor" not in log
            assert time.monotonic() < end, log
            time.sleep(0.5)

    with started(images, *CONFINED, SHARED_MEMORY, "--volume=/state", "--volume=/cache") as number:
        killed = start_id(number)
        images.run("kill", number)
        images.run("start", number)
        assert start_id(number, other_than=killed)


def test_a_sidecar_with_tls_is_healthy(images: Docker, tmp_path: Path) -> None:
    """Its own check speaks TLS where it does, whoever signed for whatever name."""
    signed(tmp_path, "sidecar.example")
    for path in (tmp_path, *tmp_path.iterdir()):
        path.chmod(0o755)
    served = [
        f"--env=KIMI_K3_SIDECAR_TLS_{name}_FILE=/tls/tls.{suffix}"
        for name, suffix in (("CERT", "crt"), ("KEY", "key"))
    ]
    options = (*CONFINED, *served, f"--volume={tmp_path}:/tls:ro", "--health-interval=1s")
    with started(images, *options, image=SIDECAR) as number:
        becomes_healthy(images, number)


def test_stop_at_once(images: Docker) -> None:
    """A container's first process gets no signal that it has no handler for; this one soon has."""
    with started(images, SHARED_MEMORY) as number:
        began = time.monotonic()
        images.run("stop", "--time=30", number)
        assert time.monotonic() - began < 15
