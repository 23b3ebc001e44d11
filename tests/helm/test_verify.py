# SPDX-License-Identifier: Apache-2.0
"""The pod of ``helm test`` that makes every verification: what it runs, what it sees and what it is given.

In tests/docker its container does so, of a real vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_k3.cli.application import run
from kimi_k3.verify import everything, kernel
from kimi_k3.verify.results import State
from tests.helm.cases import CASES, CPU, EVERYTHING, FACTS, GATEWAYS, PROFILES, of_profile
from tests.helm.rendering import MONITORING, Object, containers, engine_pod, merged, one, rendered

APIS = (*MONITORING, *GATEWAYS)
ENABLED: dict[str, Any] = {"verify": {"enabled": True}}
IDLE: dict[str, Any] = {"replicas": 0, **ENABLED}
ENGINE = "://k3-kimi-k3-gfx942.models.svc:8000"
SIDECAR = "://k3-kimi-k3-gfx942-sidecar.models.svc:8001"


def verification(values: dict[str, Any]) -> tuple[Object, Object]:
    """The pod's specification and its container."""
    spec = one(rendered(values, apis=APIS), "Pod", "-verify")["spec"]
    (container,) = spec["containers"]
    return spec, container


def test_nothing_unless_it_is_asked_for() -> None:
    """It takes hours and loads the server, so `helm test` alone must not begin it."""
    assert [each["metadata"]["name"] for each in rendered(CASES["ep8"]) if each["kind"] == "Pod"] == [
        "k3-kimi-k3-gfx942-test"
    ]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``kimi-k3 verify`` was told to make, by its own reading of the command line."""
    told: dict[str, Any] = {}

    def noted(target: Any, out: Path, **named: Any) -> State:
        told.update(target=target, out=out, **named)
        return State.PASS

    monkeypatch.setattr(everything, "run_all", noted)
    monkeypatch.setattr(kernel, "run_kernel", noted)
    return told


def placed(arguments: list[str], directory: Path) -> list[str]:
    """The arguments with the pod's directories below another one."""
    for name in ("/run/secrets", "/results", "/models", "/opt"):
        arguments = [each.replace(f"={name}", f"={directory}{name}") for each in arguments]
    return arguments


@pytest.mark.parametrize("case", [*PROFILES, "verified", "everything", "two-nodes"])
def test_what_is_asked(case: str, tmp_path: Path, made: dict[str, Any]) -> None:
    """The program takes the command line, and reads from it the release's Services, Secrets and profile."""
    values = merged(CASES[case], ENABLED)
    spec, container = verification(values)
    secrets = {
        f"{mount['mountPath']}/{item['path']}"
        for mount in container["volumeMounts"]
        for volume in spec["volumes"]
        if volume["name"] == mount["name"] and "secret" in volume
        for item in volume["secret"].get("items", [{"path": "ca.crt"}])
    }
    for path in secrets:
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).write_text("secret")
    assert run(placed(container["args"], tmp_path)) == 0
    target = made["target"]
    scheme = "https" if "tls" in values else "http"
    assert (target.engine, target.sidecar) == (f"{scheme}{ENGINE}", f"{scheme}{SIDECAR}")
    auth = values.get("auth", {})
    assert (target.api_key is not None) is ("apiKeySecret" in auth)
    assert (target.token is not None) is ("sidecarTokenSecret" in auth)
    assert (target.authorities is not None) is ("tls" in values)
    profile = values.get("profile", "ep8")
    facts = FACTS["profiles"][profile]
    assert (made["profile"].name, target.weights) == (profile, facts["weights"])
    assert made["short"] is {"full": False}.get(values["verify"].get("extent", ""))
    assert made["remote_code"] is facts["trustRemoteCode"]
    assert str(made["out"]).removeprefix(str(tmp_path)) == (
        "/results/k3/ep8" if case == "everything" else "/results"
    )
    # Where the engine reads it: the benchmark needs its tokenizer.
    found = rendered(values, apis=APIS)
    engine = containers(found)["engine"]
    assert str(made["checkpoint"]).removeprefix(str(tmp_path)) == engine["args"][1]
    model = [mount for mount in engine["volumeMounts"] if mount["name"] == "model"]
    assert [mount for mount in container["volumeMounts"] if mount["name"] == "model"] == model
    volumes = engine_pod(found)["spec"]["volumes"]
    assert [each for each in spec["volumes"] if each["name"] == "model"] == [
        each for each in volumes if each["name"] == "model"
    ]
    assert container["image"] == engine["image"]


@pytest.mark.parametrize(
    ("override", "may"), [(True, True), ("true", True), (False, False), ("false", False), (None, True)]
)
def test_the_checkpoints_code(override: Any, may: bool) -> None:
    """It may run here where it may run in the engine, and nowhere else."""
    given = {} if override is None else {"overrides": {"trust-remote-code": override}}
    _, container = verification(merged(merged(of_profile("ep8"), ENABLED), given))
    assert ("--trust-remote-code" in container["args"]) is may


@pytest.mark.parametrize("case", [*PROFILES, "everything"])
def test_no_gpus(case: str) -> None:
    """The engine holds them: a pod that waited for one would wait as long as the release lives."""
    spec, container = verification(merged(CASES[case], ENABLED))
    assert not [name for kind in container["resources"].values() for name in kind if "/" in name]
    assert "supplementalGroups" not in spec["securityContext"]


def test_where_the_checkpoint_is_at_hand() -> None:
    """A directory of a node, or a volume of one node, can be read there only; one in the image everywhere."""
    spec, _ = verification(merged(of_profile("ep8"), ENABLED))
    (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    pod = engine_pod(rendered(of_profile("ep8")))
    assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert "affinity" not in verification(merged(CPU, ENABLED))[0]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_kernel_without_replicas(profile: str, tmp_path: Path, made: dict[str, Any]) -> None:
    """The GPUs are free then: one of them, and what a pod needs to use it; nobody is asked."""
    values = merged(of_profile(profile), IDLE | {"security": {"gpuGroups": [993, 44]}})
    spec, container = verification(values)
    assert run(placed(container["args"], tmp_path)) == 0
    assert (made["profile"].name, made["target"].sidecar) == (profile, None)
    if not FACTS["profiles"][profile]["gpusPerNode"]:
        return
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["amd.com/gpu"] == "1"
    wanted = engine_pod(rendered(values))["spec"]
    for key in ("affinity", "tolerations"):
        assert spec[key] == wanted[key]
    assert spec["securityContext"] == wanted["securityContext"]
    assert not {"model", "tls", "api-key", "sidecar-token"} & {each["name"] for each in spec["volumes"]}


def test_the_results_are_kept() -> None:
    """In a claim that is the operator's own, so that nothing of the release takes them along."""
    for case, wanted in (
        ("everything", {"persistentVolumeClaim": {"claimName": "verifications"}}),
        ("verified", {"emptyDir": {"sizeLimit": "1Gi"}}),
    ):
        spec, container = verification(CASES[case])
        (volume,) = [each for each in spec["volumes"] if each["name"] == "results"]
        assert volume == {"name": "results", **wanted}
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "results"]
        assert mount == {"name": "results", "mountPath": "/results"}


def test_the_network_lets_it_ask() -> None:
    """The policies know it as a test: one lets it out to the engine's pods, the other lets it in there."""
    found = rendered(EVERYTHING, apis=APIS)
    labels = one(found, "Pod", "-verify")["metadata"]["labels"]
    out = one(found, "NetworkPolicy", "-test")["spec"]
    assert out["podSelector"]["matchLabels"].items() <= labels.items()
    policy = one(found, "NetworkPolicy", "gfx942")["spec"]
    peers = [peer for rule in policy["ingress"] for peer in rule["from"] if "podSelector" in peer]
    assert [peer for peer in peers if peer["podSelector"].get("matchLabels", {}).items() <= labels.items()]
