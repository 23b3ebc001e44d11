# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles, compose files and scripts as files: what can be wrong with them before anything is built."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import kimi_k3
from kimi_k3.plan.budget import budgets
from kimi_k3.profiles.load import load_profile
from kimi_k3.sidecar.metrics import METRICS
from tests.docker.engine import compose_binary
from tests.docker.pins import PINS, ROOT, variables
from tests.surroundings import SURROUNDINGS

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE_FILES = sorted((ROOT / "docker" / "compose").glob("*.yaml"))
BUILD = ROOT / "docker" / "build"
SCRIPTS = [*(ROOT / "scripts").iterdir(), *(BUILD / name for name in ("pip", "inventory", "aiter"))]
RULES = ROOT / "helm/kimi-k3-gfx942/files/rules/kimi-k3.yaml"
FILLED = {
    "KIMI_K3_HARDWARE": "mi325x",
    "COMPOSE_PROFILES": "mi325x,grafana",
    "KIMI_K3_MODEL_DIR": "/models",
    "KIMI_K3_API_KEY_FILE": "/etc/hostname",
    "KIMI_K3_RENDER_GID": "993",
    "KIMI_K3_VIDEO_GID": "44",
}


def config(*arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    """``docker compose config`` with these variables, which needs no engine."""
    surroundings = {name: value for name, value in SURROUNDINGS.items() if not name.startswith("COMPOSE_")}
    return subprocess.run(
        [compose_binary(), *arguments, "config", "--format", "json"],
        cwd=ROOT,
        env={**surroundings, **given},
        capture_output=True,
        text=True,
    )


def services(*arguments: str, **given: str) -> dict[str, dict[str, Any]]:
    """The services as compose understands them."""
    done = config(*arguments, **given)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint(path: Path) -> None:
    """The usual mistakes of Dockerfiles are not made."""
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(path: Path) -> None:
    """Nor those of shell scripts."""
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), path], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_one_wheel() -> None:
    """Each Dockerfile has the stage that builds the wheel, to the letter: so it is built once for all."""
    stages = set()
    for path in DOCKERFILES:
        found = re.search(r"^FROM \S+ AS wheel\n(.*?)^FROM", path.read_text(), re.MULTILINE | re.DOTALL)
        assert found is not None
        stages.add(found[1])
    assert len(stages) == 1


def test_version() -> None:
    """Images are called after the package's version."""
    assert PINS["VERSION"] == kimi_k3.__version__


def test_every_pin_is_used() -> None:
    """A pin that nothing reads would only seem to pin something."""
    text = "".join(path.read_text() for path in COMPOSE_FILES)
    assert {name for name in PINS if f"${{{name}}}" not in text} == set()


def test_images_are_pinned_by_digest() -> None:
    """A tag may name another image tomorrow. The ROCm base alone has none: nobody here has pulled it."""
    images = {name: value for name, value in PINS.items() if name.endswith("_IMAGE")}
    without = {
        name for name, value in images.items() if not re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", value)
    }
    assert without == {"ROCM_IMAGE"}


def test_example() -> None:
    """.env.example tells every variable that may be set, and no other."""
    text = "".join(path.read_text() for path in (*COMPOSE_FILES, ROOT / "compose.yaml"))
    asked = set(re.findall(r"\$\{(KIMI_K3_\w+)", text)) | {"COMPOSE_PROFILES"}
    told = set(re.findall(r"^#?([A-Z][A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert told == asked - {"KIMI_K3_WEIGHTS"}
    required = {name for name, value in variables(ROOT / ".env.example").items() if not value}
    assert required == set(re.findall(r"\$\{(\w+):\?", text))


def test_cpu_needs_nothing() -> None:
    """`docker compose --profile cpu up` works as it is."""
    found = services("--profile", "cpu")
    assert set(found) == {"engine", "sidecar", "prometheus"}
    assert "devices" not in found["engine"]


@pytest.mark.parametrize("given", [{"COMPOSE_PROFILES": "cpu"}, FILLED], ids=["cpu", "mi325x"])
def test_proxies_reach_the_builds(given: dict[str, str]) -> None:
    """Docker passes them only where it is asked to."""
    proxy = "http://proxy.example:3128"
    found = services(**given, HTTPS_PROXY=proxy, no_proxy="localhost")
    for name in ("engine", "sidecar"):
        assert found[name]["build"]["args"]["HTTPS_PROXY"] == proxy
        assert found[name]["build"]["args"]["no_proxy"] == "localhost"


@pytest.mark.parametrize("given", [{"COMPOSE_PROFILES": "cpu,grafana"}, FILLED], ids=["cpu", "mi325x"])
def test_logs_have_an_end(given: dict[str, str]) -> None:
    """An engine logs each request for weeks."""
    for service in services(**given).values():
        assert {"max-size", "max-file"} <= set(service["logging"]["options"])


def test_mi325x_asks_for_what_must_be_set() -> None:
    """One message per start, which says what to set and where to read it."""
    for name in ("KIMI_K3_MODEL_DIR", "KIMI_K3_API_KEY_FILE", "KIMI_K3_RENDER_GID", "KIMI_K3_VIDEO_GID"):
        done = config(**{**FILLED, name: ""})
        assert done.returncode != 0
        assert f"required variable {name} is missing a value: set it to" in done.stderr


def test_mi325x_without_its_settings() -> None:
    """The profile alone, without .env, starts nothing instead of everything but the engine."""
    assert services("--profile", "mi325x") == {}


@pytest.mark.parametrize("given", [{"COMPOSE_PROFILES": "cpu,grafana"}, FILLED], ids=["cpu", "mi325x"])
def test_confined(given: dict[str, str]) -> None:
    """No service has a capability, can become root, writes into its image, or is open to other machines."""
    found = services(**given)
    assert set(found) == {"engine", "sidecar", "prometheus", "grafana"}
    for service in found.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert "cap_add" not in service
        assert "privileged" not in service
        for port in service["ports"]:
            assert port["host_ip"] == "127.0.0.1"


def test_no_secret_in_the_environment() -> None:
    """Keys are files: an environment is in every dump."""
    found = services(**FILLED)
    assert found["engine"]["environment"] == {"KIMI_K3_ACCEPT_LOSSY": "0"}
    assert "--api-key-file=/run/secrets/api-key" in found["engine"]["command"]


def test_budgets_are_the_plans() -> None:
    """Docker gives the default profile as long to end as the plan says; else requests are cut off."""
    for given, profile in (({"COMPOSE_PROFILES": "cpu"}, "cpu-tiny"), (FILLED, "ep8")):
        grace = str(services(**given)["engine"]["stop_grace_period"])
        minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", grace).groups("0")  # type: ignore[union-attr]
        chosen = load_profile(profile)
        plan = budgets(
            chosen.start_timeout_seconds, chosen.drain_timeout_seconds, chosen.readiness_delay_seconds
        )
        assert int(minutes) * 60 + int(seconds) >= plan.termination_grace


def test_rules() -> None:
    """Prometheus takes the configuration and the rules that it is started with."""
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on this machine; run scripts/programs")
    for command, path in (("rules", RULES), ("config", ROOT / "docker" / "prometheus" / "prometheus.yml")):
        arguments = ["--syntax-only"] if command == "config" else []
        done = subprocess.run(
            ["promtool", "check", command, *arguments, path], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_dashboards() -> None:
    """Every metric of ours that a dashboard or a rule names is told by the sidecar; panels are described."""
    known = {metric.name for metric in METRICS}
    named = set(re.findall(r"\bkimi_k3_\w+", RULES.read_text()))
    for path in (ROOT / "helm/kimi-k3-gfx942/files/dashboards").glob("*.json"):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["fieldConfig"]["defaults"]["noValue"]
            for target in panel["targets"]:
                named |= set(re.findall(r"\bkimi_k3_\w+", target["expr"]))
    assert named
    assert named <= known


def test_grafana_finds_them() -> None:
    """Data source and dashboards are where Grafana's provisioning looks."""
    provisioning = ROOT / "docker" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kimi-k3.yaml").read_text())["providers"]
    volumes: Any = services(COMPOSE_PROFILES="cpu,grafana")["grafana"]["volumes"]
    mounted = {one["target"]: Path(one["source"]) for one in volumes if one["type"] == "bind"}
    assert mounted["/etc/grafana/provisioning"] == provisioning
    assert list(mounted[provider["options"]["path"]].glob("*.json"))
