# SPDX-License-Identifier: Apache-2.0
"""What is rendered: right by Kubernetes' schemas, as the golden files have it, and safe."""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kimi_k3.plan.chart import chart_document
from tests.helm import golden, readme
from tests.helm.cases import CASES, EVERYTHING, FACTS, GATEWAYS, PROFILES, of_profile
from tests.helm.programs import HELM_3, HELM_4, Release
from tests.helm.rendering import (
    CHART,
    GROUPS,
    MINORS,
    MONITORING,
    Object,
    containers,
    engine_pod,
    merged,
    objects,
    one,
    pod_templates,
    ran,
    rendered,
    template,
)
from tests.observability.alerting import of_release

APIS = (*MONITORING, *GATEWAYS)


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_it(case: str, minor: str) -> None:
    """Every object follows its schema to the letter, in every minor version that the chart is for."""
    unknown = set()
    for found in rendered(CASES[case], apis=APIS, minor=minor):
        try:
            kubernetes_validate.validate(found, minor, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            unknown.add(f"{found['apiVersion']}/{found['kind']}")
    assert unknown <= {
        *MONITORING,
        f"{GROUPS}/LeaderWorkerSet",
        "gateway.networking.k8s.io/v1/HTTPRoute",
        "inference.networking.k8s.io/v1/InferencePool",
    }


FEATURES: dict[str, dict[str, Any]] = {
    "verifications": {"verify": {"enabled": True}},
    "the kernel": {"verify": {"enabled": True}, "replicas": 0},
    "replicas": {"replicas": 2},
    "keys": {"auth": {"apiKeySecret": {"name": "clients"}, "sidecarTokenSecret": {"name": "operators"}}},
    "TLS": {"tls": {"secretName": "certificate"}},
    "TLS by a public authority": {"tls": {"secretName": "certificate", "caKey": ""}},
    "IPv6": {"service": {"listen": "::"}},
    "a claim": {"model": {"hostPath": "", "inImage": "", "existingClaim": "models"}},
    "a download": {
        "model": {
            **{"hostPath": "", "inImage": "", "path": ""},
            "download": {"enabled": True, "revision": 40 * "a", "accessModes": ["ReadWriteMany"]},
        }
    },
    "a kept cache": {"storage": {"cache": {"persistent": True, "accessModes": ["ReadWriteMany"]}}},
    "no policies": {"networkPolicy": {"enabled": False}},
    "no monitoring": {
        "monitoring": {"serviceMonitor": {"enabled": False}, "dashboards": {"enabled": False}},
    },
    "a gateway": {"gateway": EVERYTHING["gateway"]},
    "GPUs by label": {
        "scheduling": {"gpuNodes": "none", "nodeSelector": {"pool": "gpu"}, "tolerations": []},
    },
    "another name": {"fullnameOverride": "f" * 63, "nameOverride": "n" * 63},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_with_every_feature(profile: str, feature: str) -> None:
    """In the oldest and the newest Kubernetes, and no two objects or containers' variables of one name."""
    values = merged(of_profile(profile), FEATURES[feature])
    for minor in (MINORS[0], MINORS[-1]):
        found = rendered(values, apis=APIS, minor=minor)
        names = [(each["kind"], each["metadata"]["name"]) for each in found]
        assert len(set(names)) == len(names)
        for each in found:
            with contextlib.suppress(kubernetes_validate.SchemaNotFoundError):
                kubernetes_validate.validate(each, minor, strict=True)
        for pod in pods(found):
            volumes = {each["name"] for each in pod["volumes"]}
            for container in (*pod.get("initContainers", []), *pod["containers"]):
                assert {each["name"] for each in container["volumeMounts"]} <= volumes
                variables = [each["name"] for each in container.get("env", [])]
                assert len(set(variables)) == len(variables)


def test_every_series_says_of_which_release() -> None:
    """Two releases in a cluster tell the same series; dashboards and alerts ask for the label ``release``."""
    found = rendered(CASES["pp2-tp8"], apis=APIS)
    endpoints = [
        *one(found, "ServiceMonitor")["spec"]["endpoints"],
        *one(found, "PodMonitor")["spec"]["podMetricsEndpoints"],
    ]
    assert len(endpoints) == 3
    for endpoint in endpoints:
        assert endpoint["relabelings"] == [{"targetLabel": "release", "replacement": "k3"}]
        assert "honorLabels" not in endpoint


@pytest.mark.parametrize("case", golden.KEPT)
def test_golden(case: str) -> None:
    """A change of what is rendered is seen; `python -m tests.helm.golden` writes the files anew."""
    assert (golden.DIRECTORY / f"{case}.yaml").read_text() == golden.golden(case)


def test_readme() -> None:
    """`python -m tests.helm.readme` writes it anew."""
    assert readme.FILE.read_text() == readme.readme()


def test_every_value_is_documented() -> None:
    """A value that the README does not tell is found by nobody."""
    told = {entry.path for entry in readme.entries()}

    def undocumented(values: dict[str, Any], path: str) -> list[str]:
        found = []
        for key, value in values.items():
            here = f"{path}{key}"
            if here not in told:
                found += undocumented(value, f"{here}.") if isinstance(value, dict) and value else [here]
        return found

    assert undocumented(yaml.safe_load((CHART / "values.yaml").read_text()), "") == []


def test_the_profiles_facts_are_the_programs() -> None:
    """`python -m kimi_k3.plan.chart helm/kimi-k3-gfx942/files/profiles.json` writes them anew."""
    assert (CHART / "files" / "profiles.json").read_text() == chart_document()


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
def test_lint(release: Release, tmp_path: Path) -> None:
    """Both of Helm's major versions take the chart, and render the same objects."""
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(of_profile("ep8")))
    assert "0 chart(s) failed" in ran(
        "lint", "--strict", CHART, "--values", tmp_path / "values.yaml", release=release
    )
    key = lambda found: (found["kind"], found["metadata"]["name"])  # noqa: E731
    here = rendered(EVERYTHING, apis=APIS, release=release)
    assert sorted(here, key=key) == sorted(rendered(EVERYTHING, apis=APIS), key=key)


def test_the_version_is_the_programs() -> None:
    """The chart's default images are those that `make images` of the same checkout builds."""
    import kimi_k3

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == kimi_k3.__version__


def pods(found: list[Object]) -> list[Object]:
    """The specification of every pod, whatever makes it."""
    made = []
    for each in found:
        if each["kind"] == "Job":
            made.append(each["spec"]["template"]["spec"])
        elif each["kind"] in ("Deployment", "LeaderWorkerSet"):
            made += [template["spec"] for _, template in pod_templates([each])]
        elif each["kind"] == "Pod":
            made.append(each["spec"])
    return made


@pytest.mark.parametrize("case", CASES)
def test_restricted(case: str) -> None:
    """What Kubernetes' restricted standard asks of containers, and more: no token, no service links."""
    for pod in pods(rendered(CASES[case], apis=APIS)):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


def test_any_user() -> None:
    """OpenShift gives the user and the groups; a number of ours would be refused."""
    for pod in pods(rendered(CASES["openshift"])):
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(pod["securityContext"])


def test_no_secret_but_by_name() -> None:
    """There is no value that takes a secret, so none can be rendered, and each is a file in the pod."""
    found = rendered(EVERYTHING, apis=APIS)
    assert not [each for each in found if each["kind"] == "Secret"]
    assert len(pods(found)) == 4
    for pod in pods(found):
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            assert not [each for each in container.get("env", []) if "valueFrom" in each]
    volumes = {each["name"]: each["secret"] for each in pods(found)[0]["volumes"] if "secret" in each}
    assert volumes["api-key"] == {
        "secretName": "clients",
        "defaultMode": 0o440,
        "items": [{"key": "key", "path": "api-key"}],
    }
    assert volumes["sidecar-token"]["secretName"] == "operators"
    assert "--api-key-file=/run/secrets/engine/api-key" in containers(found)["engine"]["args"]


@pytest.mark.parametrize("profile", PROFILES)
def test_one_budget(profile: str) -> None:
    """The probe, vLLM's own limit and the rollout's deadline follow from one number (cases 2, 5)."""
    values = merged(of_profile(profile), {"startup": {"timeoutSeconds": 3000, "pullSeconds": 100}})
    found = rendered(values)
    engine = containers(found)["engine"]
    probe = engine["startupProbe"]
    assert "--start-timeout=3000" in engine["args"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3120
    if FACTS["profiles"][profile]["nodes"] == 1:
        assert one(found, "Deployment")["spec"]["progressDeadlineSeconds"] == 3280
    assert "livenessProbe" in engine, "gated by the startup probe of the same container"


@pytest.mark.parametrize("profile", PROFILES)
def test_gpus(profile: str) -> None:
    """As many as the profile's node has, in requests and limits alike, where such GPUs are."""
    facts = FACTS["profiles"][profile]
    found = rendered(of_profile(profile))
    spec = engine_pod(found)["spec"]
    asked = {name: each["resources"] for name, each in containers(found).items()}
    if not facts["gpusPerNode"]:
        assert "affinity" not in spec
        assert "amd.com/gpu" not in json.dumps(asked)
        return
    for name in ("preflight", "engine"):
        assert asked[name]["limits"]["amd.com/gpu"] == asked[name]["requests"]["amd.com/gpu"] == "8"
    assert "amd.com/gpu" not in asked["sidecar"]["limits"]
    assert facts["deviceIds"]
    assert json.dumps(facts["deviceIds"]) in json.dumps(spec["affinity"])


def test_every_probe_follows_tls() -> None:
    """A probe, a scrape or a test that still spoke HTTP would find everything dead (case 33)."""
    plain, secure = (rendered(merged(CASES[case], {"verify": {"enabled": True}})) for case in ("ep8", "tls"))
    for found, scheme in ((plain, "http"), (secure, "https")):
        probes = [
            probe["httpGet"]["scheme"]
            for each in containers(found).values()
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
            if "httpGet" in (probe := each.get(kind, {}))
        ]
        assert len(probes) == 4
        assert set(probes) == {scheme.upper()}
        endpoints = one(found, "ServiceMonitor")["spec"]["endpoints"]
        assert {each["scheme"] for each in endpoints} == {scheme}
        ports = [port for each in found if each["kind"] == "Service" for port in each["spec"]["ports"]]
        assert {port["appProtocol"] for port in ports} == {scheme}
        tests = [each["spec"]["containers"][0] for each in found if each["kind"] == "Pod"]
        assert [each["name"] for each in tests] == ["test", "verify"]
        urls = [each for test in tests for each in test["args"] if "://" in each]
        assert len(urls) == 4
        assert all(f"={scheme}://" in each for each in urls)
    assert "serverName: k3-kimi-k3-gfx942-sidecar.models.svc" in template(CASES["tls"])
    assert "--tls-cert-file=/run/secrets/tls/tls.crt" in containers(secure)["engine"]["args"]


def test_objects_in_the_document() -> None:
    """What an operator copies is valid, and the certificate bears the names that are asked."""
    text = (CHART.parent.parent / "docs" / "kubernetes.md").read_text()
    volumes, certificate = re.findall(r"^ *```yaml\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    for each in objects(volumes):
        kubernetes_validate.validate(each, "1.35", strict=True)
    names = yaml.safe_load(textwrap.dedent(certificate))["spec"]["dnsNames"]
    found = template(CASES["tls"]).replace(".models.svc", ".kimi-k3.svc")
    assert {f"serverName: {name}" for name in names} == set(re.findall(r"serverName: \S+", found))


@pytest.mark.parametrize("case", CASES)
def test_every_port_and_label_leads_somewhere(case: str) -> None:
    """A Service, a monitor, a policy or a route that points past the pods is silent about it."""
    found = rendered(CASES[case], apis=APIS)
    pod = engine_pod(found)
    named = {
        port["name"]: port["containerPort"]
        for each in containers(found).values()
        for port in each.get("ports", [])
    }
    services = {each["metadata"]["name"]: each for each in found if each["kind"] == "Service"}
    targets = {}
    for service in services.values():
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        for port in service["spec"]["ports"]:
            target = port["targetPort"]
            targets[service["metadata"]["name"], port["port"]] = named.get(target, target)
    assert set(targets.values()) == set(named.values()) == {8000, 8001}
    (monitor,) = [each for each in found if each["kind"] == "ServiceMonitor"]
    selector = monitor["spec"]["selector"]
    (components,) = [each["values"] for each in selector["matchExpressions"]]
    selected = [
        port["name"]
        for service in services.values()
        if selector["matchLabels"].items() <= service["metadata"]["labels"].items()
        and service["metadata"]["labels"]["app.kubernetes.io/component"] in components
        for port in service["spec"]["ports"]
    ]
    assert sorted(each["port"] for each in monitor["spec"]["endpoints"]) == sorted(selected)
    for route in (each for each in found if each["kind"] == "HTTPRoute"):
        for backend in route["spec"]["rules"][0]["backendRefs"]:
            if backend.get("kind") == "InferencePool":
                pool = one(found, "InferencePool")
                assert pool["metadata"]["name"] == backend["name"]
                assert pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
                assert pool["spec"]["targetPorts"] == [{"number": 8000}]
            else:
                assert targets[backend["name"], backend["port"]] == 8000
    policy = next(each for each in found if each["kind"] == "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())} == {
        8000,
        8001,
    }


def test_where_the_checkpoint_is() -> None:
    """Each source is mounted where the command line looks for it."""
    for values, volume, checkpoint in (
        (CASES["ep8"], {"hostPath": {"path": "/mnt/models", "type": "Directory"}}, "/models/Kimi-K3"),
        (
            CASES["openshift"],
            {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
            "/models/Kimi-K3",
        ),
        (
            CASES["everything"],
            {"persistentVolumeClaim": {"claimName": "k3-kimi-k3-gfx942-model"}},
            "/models",
        ),
    ):
        found = rendered(values, apis=APIS)
        (mounted,) = [each for each in engine_pod(found)["spec"]["volumes"] if each["name"] == "model"]
        assert mounted == {"name": "model", **volume}
        engine = containers(found)["engine"]
        assert engine["args"][1] == checkpoint
        assert {"name": "model", "mountPath": "/models", "readOnly": True} in engine["volumeMounts"]


RESTRICTED = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def test_a_restricted_namespace() -> None:
    """With a claim the pod is one that Kubernetes' restricted standard takes; not with hostPath."""
    for case, allowed in (("openshift", True), ("everything", True), ("ep8", False)):
        kinds = {
            key for pod in pods(rendered(CASES[case], apis=APIS)) for each in pod["volumes"] for key in each
        }
        assert (kinds - {"name"} <= RESTRICTED) is allowed


def test_the_gateways_may_come() -> None:
    """A route whose gateway the policy keeps out would answer 503."""
    policy = next(each for each in rendered(EVERYTHING, apis=APIS) if each["kind"] == "NetworkPolicy")
    peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}} in peers


def test_a_download_through_a_proxy() -> None:
    """The policy lets it reach a mirror at its port, and a proxy at the one that is named."""
    download = {"endpoint": "https://hub.internal:8443", "env": {"HTTPS_PROXY": "http://proxy:3128"}}
    values = merged(EVERYTHING, {"model": {"download": download}, "networkPolicy": {"downloadPorts": [3128]}})
    found = rendered(values, apis=APIS)
    policy = one(found, "NetworkPolicy", "-download")
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert ports == {53, 5353, 3128, 8443}
    (container,) = one(found, "Job")["spec"]["template"]["spec"]["containers"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]


def test_replicas_are_not_rolled() -> None:
    """A rolling update needs twice the GPUs, and waits for ever (cases 16, 17)."""
    for case in ("ep8", "two-replicas"):
        assert one(rendered(CASES[case]), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}


def test_a_new_chart_restarts_nothing_that_it_does_not_change(tmp_path: Path) -> None:
    """A label with the chart's version on the pods would cost another start of an hour."""
    import shutil

    newer = tmp_path / "newer"
    shutil.copytree(CHART, newer)
    chart = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump({**chart, "version": "9.9.9"}))
    values = of_profile("ep8")
    before, after = rendered(values), rendered(values, chart=newer)
    assert before != after
    assert one(before, "Deployment")["spec"] == one(after, "Deployment")["spec"]


def test_selectors_do_not_take_other_pods() -> None:
    """A Service that also selected the download or the test would send requests there."""
    found = rendered(EVERYTHING, apis=APIS)
    labels = engine_pod(found)["metadata"]["labels"]
    others = [one(found, "Job")["spec"]["template"]["metadata"]["labels"]]
    others += [each["metadata"]["labels"] for each in found if each["kind"] == "Pod"]
    assert len(others) == 3
    selectors = [each["spec"]["selector"] for each in found if each["kind"] == "Service"]
    selectors += [one(found, kind)["spec"]["selector"]["matchLabels"] for kind in ("PodDisruptionBudget",)]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not [one for one in others if selector.items() <= one.items()]


def test_long_names() -> None:
    """A release with a long name still makes names that Kubernetes takes."""
    values = merged(of_profile("ep8"), {"nameOverride": "n" * 63})
    for found in rendered(values):
        assert len(found["metadata"]["name"]) <= 63
        for value in found["metadata"].get("labels", {}).values():
            assert len(value) <= 63


def test_the_dashboards_and_rules_are_the_charts_files() -> None:
    """Compose mounts the same ones."""
    found = rendered(of_profile("ep8"))
    for path in (CHART / "files" / "dashboards").glob("*.json"):
        data = one(found, "ConfigMap", path.stem)["data"][path.name]
        assert json.loads(data) == json.loads(path.read_text())
    # But for what tells releases apart: tests/observability/test_rules.py.
    texts = [path.read_text() for path in sorted((CHART / "files" / "rules").glob("*.yaml"))]
    groups = [group for text in texts for group in yaml.safe_load(of_release(text, "models", "k3"))["groups"]]
    assert one(found, "PrometheusRule")["spec"]["groups"] == groups


def test_notes() -> None:
    """What Helm prints after an install: the time to wait, where to look, what is open."""
    notes = ran(
        *("install", "k3", CHART, "--dry-run=client", "--values", "-"),
        text=yaml.safe_dump(of_profile("ep8")),
    ).split("NOTES:")[1]
    assert "--wait --timeout 9180s" in notes
    assert "LOSSY" in notes
    assert "security.gpuGroups is empty" in notes
    assert "auth.apiKeySecret.name is empty" in notes
    assert template(of_profile("ep8"))
