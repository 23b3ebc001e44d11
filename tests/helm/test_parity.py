# SPDX-License-Identifier: Apache-2.0
"""What a rendered pod would run is what ``kimi-k3 plan`` says for the same profile and overrides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_k3.checkpoint import read_config
from kimi_k3.cli.application import run
from tests.helm.cases import EVERYTHING, FACTS, GATEWAYS, PROFILES, of_profile
from tests.helm.programs import HELM_3, HELM_4, Release
from tests.helm.rendering import MONITORING, Object, containers, engine_pod, merged, one, rendered
from tests.surroundings import SURROUNDINGS

CONFIG = Path(__file__).parents[1] / "checkpoint" / "data" / "k3-config.json"
EP8 = of_profile("ep8")
OF_A_START = {"VLLM_RPC_BASE_PATH", "KIMI_K3_START_ID", "KIMI_K3_STATE_DIR"}
"""Variables that every start has of its own, or that depend on the machine that is asked."""

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **{name: (of_profile(name), ()) for name in PROFILES},
    "overrides": (
        merged(
            of_profile("ep8"),
            {"overrides": {"max-model-len": 1000000, "gpu-memory-utilization": 0.93, "max-num-seqs": 8}},
        ),
        ("--set", "max-model-len=1000000", "--set", "gpu-memory-utilization=0.93", "--set", "max-num-seqs=8"),
    ),
}


@pytest.fixture(autouse=True)
def published(tmp_path: Path) -> None:
    """The published config, which is all that a plan needs."""
    shutil.copy(CONFIG, tmp_path / "config.json")


def plan(directory: Path, profile: str, further: tuple[str, ...]) -> dict[str, Any]:
    """``kimi-k3 plan --json``."""
    command = [sys.executable, "-m", "kimi_k3", "plan", str(directory), "--profile", profile, "--json"]
    done = subprocess.run(
        [*command, "--accept-lossy", *further], env=SURROUNDINGS, capture_output=True, text=True
    )
    # 1: the real model does not fit a CPU, which is no matter here.
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def would_run(
    published: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], tuple[list[str], dict[str, str]]]:
    """The argv and the variables of vLLM, by ``kimi-k3 serve --dry-run`` with a container's arguments.

    1.42 TiB are not at hand, so the checkpoint is taken for whole; its config is the published one.
    """
    config = read_config(tmp_path / "config.json")
    monkeypatch.setattr("kimi_k3.supervisor.serve.require_servable", lambda _: SimpleNamespace(config=config))

    def told(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
        capsys.readouterr()
        assert run([*arguments, "--dry-run"]) == 0, capsys.readouterr().err
        written = capsys.readouterr().out
        # The script is run with an engine that only tells what it was given.
        teller = tmp_path / "teller"
        teller.write_text(
            f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        )
        teller.chmod(0o755)
        script = written.replace(f"exec {sys.executable} ", f"exec {teller} ")
        assert script != written
        done = subprocess.run(
            ["sh"], input=script, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
        )
        argv, environment = json.loads(done.stdout)
        return argv, environment

    return told


@pytest.mark.parametrize("case", CASES)
def test_what_is_run(
    case: str, tmp_path: Path, would_run: Callable[[list[str]], tuple[list[str], dict[str, str]]]
) -> None:
    """The chart spells no flag of vLLM and sets no variable of it: it hands over a name, and changes."""
    values, further = CASES[case]
    found = containers(rendered(values))["engine"]
    state = tmp_path / "state"
    place = {"--state-dir=/state": f"--state-dir={state}", found["args"][1]: str(tmp_path)}
    arguments = [place.get(each, each) for each in found["args"]]
    # What a LeaderWorkerSet gives its pods.
    group = {"LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "FIRST_NODE"}
    for name, value in group.items():
        arguments = [each.replace(f"$({name})", value) for each in arguments]
    argv, environment = would_run(arguments)
    wanted = plan(tmp_path, values.get("profile", "ep8"), further)
    served = wanted["argv"][1:]
    served[served.index("--host") + 1] = "0.0.0.0"
    assert argv == served
    for name, value in wanted["env"].items():
        assert name in OF_A_START or environment[name] == value, name
    own = {each["name"] for each in found.get("env", ())}
    several = FACTS["profiles"][wanted["profile"]]["nodes"] > 1
    assert own == ({"VLLM_HOST_IP", "KIMI_K3_SIDECAR_TOKEN_FILE"} if several else set())


TEXTS = (
    *(
        "yes",
        "1e3",
        "0x10",
        "007",
        "null",
        "~",
        "1_000",
        "nan",
        "-1",
        "true",
        "2001-01-01",
        "[a]",
        "",
        " a  b ",
    ),
    *(
        "# no comment",
        "a: b",
        "'",
        '"',
        "\\n",
        "%s {{ .Values }}",
        "größe",
        "@",
        "*a",
        "&a",
        "!a",
        "x" * 20000,
    ),
    '{"level": 3, "cudagraph_capture_sizes": [1, 2]}',
)


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
def test_texts_arrive_as_they_are(release: Release) -> None:
    """YAML takes many a text for something else, and a template may lose its quotes."""
    for text in TEXTS:
        values = {**EP8, "overrides": {"compilation-config": text}, "engine": {"env": {"NCCL_DEBUG": text}}}
        engine = containers(rendered(values, release=release))["engine"]
        assert f"--set=compilation-config={text}" in engine["args"]
        assert {"name": "NCCL_DEBUG", "value": text} in engine["env"]


@pytest.mark.parametrize(
    ("number", "written"), [(1e6, "1000000"), (10**15, "1000000000000000"), (0.93, "0.93"), (True, "true")]
)
def test_numbers_are_written_whole(number: float, written: str) -> None:
    """Helm reads every number as one with a point, and may write 1e+06, which hardly anybody reads."""
    values = {**EP8, "overrides": {"max-model-len": number}, "engine": {"env": {"NCCL_DEBUG": number}}}
    engine = containers(rendered(values))["engine"]
    assert f"--set=max-model-len={written}" in engine["args"]
    assert {"name": "NCCL_DEBUG", "value": written} in engine["env"]


@pytest.mark.parametrize("profile", PROFILES)
def test_seconds(profile: str, tmp_path: Path) -> None:
    """The time budgets of a pod are those of the plan."""
    budgets = plan(tmp_path, profile, ())["budgets"]
    found = rendered(merged(of_profile(profile), {"startup": {"pullSeconds": 0}}))
    probe = containers(found)["engine"]["startupProbe"]
    assert engine_pod(found)["spec"]["terminationGracePeriodSeconds"] == budgets["termination_grace"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == budgets["startup_probe"]
    if FACTS["profiles"][profile]["nodes"] == 1:
        assert one(found, "Deployment")["spec"]["progressDeadlineSeconds"] == budgets["progress_deadline"]


def test_preflight_is_asked_about_the_same() -> None:
    """A check of another start would show nothing."""
    found = containers(rendered(EVERYTHING, apis=(*MONITORING, *GATEWAYS)))
    served = set(found["engine"]["args"])
    asked = found["preflight"]["args"]
    assert asked[0] == "preflight"
    assert set(asked[1:]) - {"--warnings-pass", "--wait-vram=120"} <= served
    assert mounts(found["preflight"]) == mounts(found["engine"])


def mounts(container: Object) -> list[Any]:
    """What a container sees."""
    return [container["volumeMounts"], container["image"], container.get("env")]


def test_the_facts_are_of_this_program() -> None:
    """A chart whose file of facts is older than the program would plan for another one."""
    assert set(FACTS["profiles"]) >= set(PROFILES) >= {"ep8", "tp8", "cpu-tiny"}
