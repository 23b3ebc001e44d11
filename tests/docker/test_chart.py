# SPDX-License-Identifier: Apache-2.0
"""The chart's pod, as it is rendered, run by Docker in a kubelet's stead: its containers, in their order.

One network for all; an emptyDir is a directory as a kubelet makes it, open and of the group ``fsGroup``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.verify.keeping import read_results
from kimi_k3.verify.results import Kind
from tests.docker.engine import Docker
from tests.docker.test_images import CPU, SIDECAR
from tests.helm.cases import CPU as VALUES
from tests.helm.rendering import containers, one, rendered

pytestmark = pytest.mark.engine

START_SECONDS = 240.0
VERIFY_SECONDS = 1800.0
IMAGES = {"kimi-k3-gfx942-cpu": CPU, "kimi-k3-gfx942-sidecar": SIDECAR}
LOSSY = {
    **VALUES,
    "weights": {"format": "int4", "acceptLossy": True},
    "verify": {"enabled": True},
}
ASK = "import sys, urllib.request as web; print(web.urlopen(sys.argv[1]).status)"


def asked(container: dict[str, Any]) -> dict[str, Any]:
    """A test's container: a Service is a name and a way to the pod's ports; here all is one network."""
    arguments = [
        f"{each.split('://')[0]}://127.0.0.1:{each.rsplit(':', 1)[1]}" if "://" in each else each
        for each in container["args"]
    ]
    return {**container, "args": arguments}


class Pod:
    """The rendered pod."""

    def __init__(self, docker: Docker, found: list[dict[str, Any]], directory: Path) -> None:
        self.docker = docker
        self.spec = one(found, "Deployment")["spec"]["template"]["spec"]
        self.containers = containers(found)
        tests = [one(found, "Pod", suffix)["spec"] for suffix in ("-test", "-verify")]
        self.tests = [asked(spec["containers"][0]) for spec in tests]
        self.directories = {}
        volumes = {volume["name"]: volume for spec in (*tests, self.spec) for volume in spec["volumes"]}
        for volume in volumes.values():
            assert set(volume) == {"name", "emptyDir"}
            path = directory / volume["name"]
            path.mkdir()
            path.chmod(0o2777)
            self.directories[volume["name"]] = (path, volume["emptyDir"])

    def options(self, container: dict[str, Any]) -> list[str]:
        """What Docker is told of a container: all that its specification says."""
        security, given = container["securityContext"], self.spec["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        options = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        options += [f"--user={given['runAsUser']}:{given['runAsGroup']}", f"--group-add={given['fsGroup']}"]
        for variable in container.get("env", []):
            options.append(f"--env={variable['name']}={variable['value']}")
        for mount in container["volumeMounts"]:
            path, kind = self.directories[mount["name"]]
            if kind.get("medium") == "Memory":
                options.append(f"--shm-size={kind['sizeLimit'].removesuffix('i')}")
            else:
                options.append(f"--volume={path}:{mount['mountPath']}")
        if (command := container.get("command")) is not None:
            options.append(f"--entrypoint={command[0]}")
        return options

    def arguments(self, container: dict[str, Any]) -> list[str]:
        """Its image and what comes after."""
        name = container["image"].split(":")[0]
        return [IMAGES[name], *container.get("command", [])[1:], *container["args"]]

    @contextlib.contextmanager
    def started(self, name: str, *network: str) -> Iterator[str]:
        """A container that stays."""
        container = self.containers[name]
        number = self.docker.run(
            "run", "--detach", *network, *self.options(container), *self.arguments(container)
        ).stdout.strip()
        try:
            yield number
        finally:
            self.docker.run("rm", "--force", "--volumes", number)

    def ended(self, container: dict[str, Any], *network: str) -> str:
        """What a container printed that ends by itself, and well."""
        words = (*network, *self.options(container), *self.arguments(container))
        done = self.docker.run("run", "--rm", *words, check=False, timeout=VERIFY_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def pod(images: Docker, tmp_path: Path) -> Pod:
    """The pod of ``values-cpu.yaml``, with int4 by consent."""
    return Pod(images, rendered(LOSSY), tmp_path)


def answers(docker: Docker, sidecar: str, path: str) -> bool:
    """Whether a probe at ``path`` passes, asked in the pod's network."""
    url = f"http://127.0.0.1:8001{path}"
    return docker.run("exec", sidecar, "python", "-c", ASK, url, check=False).returncode == 0


def test_the_pod_serves(pod: Pod) -> None:
    """From the sidecar's start to `helm test`: every probe as the specification has it."""
    docker = pod.docker
    assert list(pod.containers) == ["sidecar", "preflight", "engine"]
    with pod.started("sidecar") as sidecar:
        network = f"--network=container:{sidecar}"
        end = time.monotonic() + START_SECONDS
        while not answers(docker, sidecar, pod.containers["sidecar"]["startupProbe"]["httpGet"]["path"]):
            assert time.monotonic() < end
            time.sleep(0.2)
        assert "checkpoint" in pod.ended(pod.containers["preflight"], network)
        with pod.started("engine", network) as engine:
            probes = pod.containers["engine"]
            started = probes["startupProbe"]["httpGet"]["path"]
            assert not answers(docker, sidecar, started)
            while not answers(docker, sidecar, started):
                log = docker.run("logs", "--tail", "30", engine)
                state = docker.run("inspect", "--format", "{{.State.Running}}", engine).stdout.strip()
                assert state == "true", log.stdout + log.stderr
                assert time.monotonic() < end, log.stdout + log.stderr
                time.sleep(0.5)
            assert answers(docker, sidecar, probes["readinessProbe"]["httpGet"]["path"])
            alive = docker.run("exec", engine, *probes["livenessProbe"]["exec"]["command"])
            assert alive.stdout == "alive\n"
            pod.directories["tmp"][0].chmod(0o2777)
            smoke, verification = pod.tests
            told = pod.ended(smoke, network)
            assert told.count("ok    ") == 5
            assert "int4, lossy, by consent" in told
            # The miniature answers right; what the image lacks is not run, and is said.
            told = pod.ended(verification, network)
            table = told.split("--- what upstream validated\n")[1].splitlines()
            assert [
                row for row in table if row.startswith("pass    kernel against float32, as it was run")
            ], told
            assert [row for row in table if row.startswith("pass    answers, consent and metrics")], told
            assert [row for row in table if row.startswith("pass    vllm bench serve")], told
            (row,) = [row for row in table if "own word problems" in row]
            assert row.startswith("not run")
            assert "lm_eval is not installed" in row
            (row,) = [row for row in table if "GSM8K, five-shot" in row]
            assert row.startswith("not run")
            results = pod.directories["results"][0]
            assert {each.kind for each in read_results(results)} == set(Kind)
            assert {"report.html", "report.md"} <= {path.name for path in results.iterdir()}
            began = time.monotonic()
            docker.run("stop", f"--time={pod.spec['terminationGracePeriodSeconds']}", engine)
            assert time.monotonic() - began < pod.spec["terminationGracePeriodSeconds"]
            state = docker.run("inspect", "--format", "{{.State.ExitCode}}", engine).stdout.strip()
            assert state == "0"
            assert not answers(docker, sidecar, "/readyz")
            assert answers(docker, sidecar, "/livez")
