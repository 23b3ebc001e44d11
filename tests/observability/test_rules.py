# SPDX-License-Identifier: Apache-2.0
"""Every alert fires on the series that it is about and is silent on the nearest that it is not, by promtool.

The cases are data: ``rules/*.yaml``. An alert has a list of cases, each with the series of release ``a``
(those of ``b`` under ``other``), moments, and what fires then, by its labels beside those of the release.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.cases import of_profile
from tests.helm.rendering import merged, one, rendered
from tests.observability.alerting import (
    FILE,
    GPU_FILE,
    GPUS,
    SELECTED,
    alerts,
    groups,
    of_release,
    pod_of,
    rules_of,
    scaled,
)
from tests.observability.expressions import CHART, rules, with_recorded
from tests.observability.known import known
from tests.observability.lint import lint, lint_labels

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on this machine; run scripts/programs"
)
CASES: dict[str, list[dict[str, Any]]] = {
    alert: cases
    for path in sorted((Path(__file__).parent / "rules").glob("*.yaml"))
    for alert, cases in yaml.safe_load(path.read_text()).items()
}
ALERTS = alerts(FILE, GPU_FILE)
NAMESPACE = "models"
OBJECTIVE = {"seconds": 2.5, "objective": 0.99}
GPU_VALUES = {"gpus": {"enabled": True, "metricsPrefix": "amd_"}}


def promtool(*arguments: str | Path) -> None:
    """Run it; what it found wrong fails the test."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def series(name: str, values: str, release: str) -> dict[str, str]:
    """One series of a case as promtool takes it, with the labels of where it was scraped."""
    metric, _, own = name.removesuffix("}").partition("{")
    engine = metric.startswith("vllm:") or own == 'job="engine"'
    job = f"{release}-kimi-k3-gfx942" + ("" if engine else "-sidecar")
    labels = {"namespace": NAMESPACE, "release": release, "job": job}
    labels["instance"] = f"{release}:{8000 if engine else 8001}"
    if metric.startswith("gpu_"):
        labels = {
            "namespace": NAMESPACE,
            "pod": pod_of(release),
            "hostname": "node",
            "gpu_id": "3",
        }
    labels |= {} if own == 'job="engine"' else dict(re.findall(r'(\w+)="([^"]*)"', own))
    if engine and metric != "up":
        labels |= {"model_name": "kimi-k3", "engine": "0"} | dict(re.findall(r'(\w+)="([^"]*)"', own))
    written = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{metric}{{{written}}}", "values": values}


def expected(alert: str, labels: dict[str, str], severity: str, gpu: bool) -> dict[str, Any]:
    """The alert as Prometheus keeps it while it fires."""
    whose = labels.get("release", "a")
    of_gpu = {"namespace": NAMESPACE, "pod": pod_of(whose), "hostname": "node", "gpu_id": "3"}
    all_labels = {
        "alertname": alert,
        "alertstate": "firing",
        "severity": severity,
        **(of_gpu if gpu else {"namespace": NAMESPACE, "release": whose}),
        **labels,
    }
    if gpu:
        all_labels.pop("release", None)
    written = ", ".join(f'{label}="{value}"' for label, value in sorted(all_labels.items()) if value)
    return {"labels": f"ALERTS{{{written}}}", "value": 1}


def promtool_tests(alert: str, files: list[Path]) -> dict[str, Any]:
    """The cases of an alert in promtool's words."""
    severity = next(
        rule["labels"]["severity"] for rule in rules_of(groups(FILE, GPU_FILE)) if rule.get("alert") == alert
    )
    gpu = alert in alerts(GPU_FILE)
    return {
        "rule_files": [str(path) for path in files],
        "evaluation_interval": "1m",
        "tests": [
            {
                "name": case["about"],
                "interval": "1m",
                "input_series": [
                    series(name, str(values), release)
                    for release, key in (("a", "series"), ("b", "other"))
                    for name, values in case.get(key, {}).items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f'ALERTS{{alertname="{alert}", alertstate="firing"}}',
                        "eval_time": at,
                        "exp_samples": [expected(alert, labels, severity, gpu) for labels in fires],
                    }
                    for at, fires in case["at"].items()
                ],
            }
            for case in CASES[alert]
        ],
    }


@needs_promtool
@pytest.mark.parametrize("alert", ALERTS)
def test_alert(alert: str, tmp_path: Path) -> None:
    """It fires when it should, for whom it should and not before; rendered for two releases."""
    files = []
    for release in ("a", "b"):
        for path in (FILE, GPU_FILE):
            files.append(tmp_path / f"{release}-{path.name}")
            files[-1].write_text(of_release(path.read_text(), NAMESPACE, release))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(promtool_tests(alert, files), width=1000))
    promtool("test", "rules", tmp_path / "test.yaml")


ABSENCES = [alert for alert in ALERTS if alert.endswith("Absent")]


@needs_promtool
@pytest.mark.parametrize("alert", [alert for alert in ALERTS if alert not in ABSENCES])
def test_alert_as_it_lies_there(alert: str, tmp_path: Path) -> None:
    """Compose mounts the files as they are; one set of rules then tells releases apart, but for absence."""
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(promtool_tests(alert, [FILE, GPU_FILE]), width=1000))
    promtool("test", "rules", tmp_path / "test.yaml")


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_both_cases(alert: str) -> None:
    """An alert that was never seen to fire, or to be silent, is a guess; and each must know its release."""
    seen = [(case, fires) for case in CASES[alert] for fires in case["at"].values()]
    assert [case for case, fires in seen if fires]
    assert [case for case in CASES[alert] if not any(case["at"].values())]
    assert [case for case, fires in seen if len(fires) == 1 and case.get("other")], (
        "no case with two releases"
    )


def test_no_case_without_an_alert() -> None:
    """A renamed alert must not leave its cases behind, unread."""
    assert set(CASES) == set(ALERTS)
    assert len(set(ALERTS)) == len(ALERTS)


@needs_promtool
def test_the_files_are_rules() -> None:
    """Prometheus takes them as they lie there: compose mounts them."""
    promtool("check", "rules", FILE, GPU_FILE)


def selectors(expression: str) -> list[str]:
    """The braces of an expression's selectors, and names that are selected without any."""
    found = re.findall(r"(?:[a-z_]+:)?[a-z_0-9:]+\{([^}]*)\}", expression)
    bare = re.sub(r"\{[^}]*\}|\b(?:by|on|group_left)\s*\([^)]*\)|\[[^]]*\]|\"[^\"]*\"", "§", expression)
    return found + re.findall(r"\b(?:kimi_k3_|vllm:|namespace_release|gpu_|up\b)[\w:]*(?!§|[\w:])", bare)


@pytest.mark.parametrize("path", [FILE, GPU_FILE], ids=lambda path: path.name)
def test_every_selector_asks_for_the_release(path: Path) -> None:
    """One that does not would let the alerts of one release fire by another's series."""
    asked = GPUS if path == GPU_FILE else SELECTED
    for rule in rules_of(groups(path)):
        found = selectors(rule["expr"])
        assert found
        assert [each for each in found if asked not in each] == [], rule["expr"]


def test_a_selector_without_the_release_is_seen() -> None:
    """The check above would else pass everything."""
    assert selectors('kimi_k3_ready == 1 and on (release) up{job="x"}') == ['job="x"', "kimi_k3_ready"]
    assert selectors('rate(vllm:num_preemptions_total{release=~".+"}[5m])') == ['release=~".+"']
    assert selectors("sum by (release) (vllm:num_preemptions_total)") == ["vllm:num_preemptions_total"]


DOWNLOAD = {
    "model": {
        "hostPath": "",
        "existingClaim": "",
        "download": {"enabled": True, "revision": "0" * 40, "timeoutSeconds": 7200},
    }
}


def in_blocks(found: list[dict[str, Any]]) -> str:
    """Rules as text, as their expressions are."""
    return "\n".join(f"{rule['expr']}\n{rule.get('annotations')}" for rule in rules_of(found))


def rendered_rules(
    name: str, more: dict[str, Any] | None = None, *, profile: str = "ep8", **of_rules: Any
) -> list[dict[str, Any]]:
    """The groups of the PrometheusRule that the chart makes."""
    values = merged(of_profile(profile), {**(more or {}), "monitoring": {"rules": of_rules}})
    found: list[dict[str, Any]] = one(rendered(values, name=name), "PrometheusRule")["spec"]["groups"]
    return found


@pytest.mark.parametrize("release", ["a", "b"])
def test_the_chart_renders_them_for_its_release(release: str, tmp_path: Path) -> None:
    """What the other tests load is what the chart makes, and Prometheus takes it."""
    found = rendered_rules(release, gpus={"enabled": True})
    made = [
        group
        for path in (FILE, GPU_FILE)
        for group in yaml.safe_load(of_release(path.read_text(), NAMESPACE, release))["groups"]
    ]
    assert found == made
    for rule in rules_of(found):
        for matchers in selectors(rule["expr"]):
            assert f'namespace="{NAMESPACE}"' in matchers
            assert f'release="{release}"' in matchers or f'pod=~"{release}-kimi-k3-gfx942-[' in matchers
    if PROMTOOL is not None:
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": found}))
        promtool("check", "rules", tmp_path / "rules.yaml")


def waiting(served: bool) -> dict[str, str]:
    """Series of a sidecar that nobody reports to from the first minute on, and of one that served before."""
    own = {
        'kimi_k3_build_info{instance="a-2:8001"}': "_ 1+0x300",
        'process_start_time_seconds{instance="a-2:8001"}': "_ 60+0x300",
    }
    return own | ({'kimi_k3_ready{instance="a-1:8001"}': "1 stale"} if served else {})


@needs_promtool
@pytest.mark.parametrize(("served", "fires"), [(False, 181), (True, 61)], ids=["first", "again"])
def test_a_download_is_waited_for(served: bool, fires: int, tmp_path: Path) -> None:
    """Two hours of download and one more; but what served within a day has its checkpoint already."""
    found = rendered_rules("a", DOWNLOAD)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": found}))
    labels = f'alertname="KimiK3NoStart", namespace="{NAMESPACE}", release="a", instance="a-2:8001"'
    alert = {"labels": f'ALERTS{{{labels}, alertstate="firing", severity="warning"}}', "value": 1}
    expr = 'ALERTS{alertname="KimiK3NoStart", alertstate="firing"}'
    case = {
        "rule_files": [str(tmp_path / "rules.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [series(name, values, "a") for name, values in waiting(served).items()],
                "promql_expr_test": [
                    {"expr": expr, "eval_time": f"{fires - 1}m", "exp_samples": []},
                    {"expr": expr, "eval_time": f"{fires}m", "exp_samples": [alert]},
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(case, width=1000))
    promtool("test", "rules", tmp_path / "test.yaml")


OF_PODS = {
    "ep8": ("{}-7d9f8b6c5-x2x4z", "{}-b-7d9f8b6c5-x2x4z", "{}-download-0a1b2c3d-x2x4z"),
    "pp2-tp8": ("{}-nodes-0-1", "{}-b-nodes-0-1", "{}-nodes-b-nodes-0-1"),
}
"""Pods of one release, and of others whose names begin alike, by their profile."""


@needs_promtool
@pytest.mark.parametrize("profile", OF_PODS)
@pytest.mark.parametrize("release", ["kimi-k3-gfx942", "a"])
def test_gpus_of_a_release_whose_name_begins_another_ones(profile: str, release: str, tmp_path: Path) -> None:
    """The broken GPU of kimi-k3-gfx942-b wakes nobody for kimi-k3-gfx942, however many nodes both have."""
    groups_of = rendered_rules(release, profile=profile, gpus={"enabled": True})
    name = release if "kimi" in release else f"{release}-kimi-k3-gfx942"
    own, *others = (pattern.format(name) for pattern in OF_PODS[profile])
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups_of}))
    broken = [f'gpu_health{{namespace="{NAMESPACE}", pod="{pod}", gpu_id="3"}}' for pod in (own, *others)]
    labels = (
        f'alertname="KimiK3GpuUnhealthy", alertstate="firing", severity="critical", gpu_id="3", pod="{own}"'
    )
    case = {
        "rule_files": [str(tmp_path / "rules.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": each, "values": "0+0x9"} for each in broken],
                "promql_expr_test": [
                    {
                        "expr": 'ALERTS{alertname="KimiK3GpuUnhealthy", alertstate="firing"}',
                        "eval_time": "5m",
                        "exp_samples": [
                            {"labels": f'ALERTS{{namespace="{NAMESPACE}", {labels}}}', "value": 1}
                        ],
                    }
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(case, width=1000))
    promtool("test", "rules", tmp_path / "test.yaml")


def test_no_gpu_alert_unless_asked_for() -> None:
    """Where nobody scrapes AMD's exporter its absence would fire for ever."""
    named = [rule.get("alert") for rule in rules_of(rendered_rules("a"))]
    assert not set(named) & set(alerts(GPU_FILE))
    assert set(named) - {None} == set(alerts(FILE))


def test_what_an_operator_may_change() -> None:
    """Each of the chart's replacements meets something, and nothing of the default is left."""
    wiki = "https://wiki.example/runbook"
    given: dict[str, Any] = {"timeToFirstToken": OBJECTIVE, "runbookUrl": wiki, **GPU_VALUES}
    text = in_blocks(rendered_rules("a", DOWNLOAD, **given))
    default = in_blocks(rendered_rules("a", gpus={"enabled": True}))
    for old, new in (
        ('le="10.0"', 'le="2.5"'),
        ("(1 - 0.95)", "(1 - 0.99)"),
        ("docs/runbook.md#", "https://wiki.example/runbook#"),
        (" < 0\n", " < 7200\n"),
        ("(gpu_health{", "(amd_gpu_health{"),
        ("(gpu_ecc_uncorrect_total{", "(amd_gpu_ecc_uncorrect_total{"),
    ):
        assert default.count(old) == text.count(new) > 0
        assert old not in text


@pytest.mark.parametrize("rule", list(rules(GPU_FILE.parent)), ids=lambda rule: rule.expression.where)
def test_gpu_rules_name_only_what_there_is(rule: Any) -> None:
    """Of the exporter's metrics and labels; its absence says who is meant only once it is rendered."""
    text = of_release(rule.expression.text, NAMESPACE, "a")
    assert lint(text, with_recorded(known())) == []
    assert lint_labels(text, rule.expression.shown, with_recorded(known())) == []


@pytest.mark.parametrize("rule", [rule for rule in rules_of(groups(FILE, GPU_FILE)) if "alert" in rule])
def test_what_an_alert_says(rule: dict[str, Any]) -> None:
    """Whoever is woken by it reads what it is, of which release, how bad, and where to read on."""
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert notes["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
    assert "{{" not in notes["summary"], "alerts are grouped by it"
    whose = "$labels.pod" if rule["alert"] in alerts(GPU_FILE) else "$labels.release"
    assert whose in notes["description"] or "$labels.namespace" in notes["description"]
    assert rule["alert"].startswith("KimiK3")


def test_scaling() -> None:
    """Time runs faster everywhere in a rule, and nothing else changes."""
    given = [
        {
            "name": "g",
            "interval": "1m",
            "rules": [
                {
                    "alert": "A",
                    "expr": 'rate(x{le="10.0"}[5m]) > 14.4 * (1 - 0.95) and y[3d] offset z',
                    "for": "1h",
                },
                {"record": "r5m", "expr": "x"},
            ],
        }
    ]
    (made,) = scaled(given, 60)
    assert made == {
        "name": "g",
        "interval": "1000ms",
        "rules": [
            {
                "alert": "A",
                "expr": 'rate(x{le="10.0"}[5000ms]) > 14.4 * (1 - 0.95) and y[4320000ms] offset z',
                "for": "60000ms",
            },
            {"record": "r5m", "expr": "x"},
        ],
    }
    assert given[0]["interval"] == "1m"


def test_scaling_meets_every_duration() -> None:
    """A duration in another form (an offset, a subquery, two units) would stay as long as it is."""
    for rule in rules_of(groups(FILE, GPU_FILE)):
        left = re.sub(r"\[\d+[smhd]\]", "", rule["expr"])
        assert "[" not in left
        assert "offset" not in left
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "1m"))


def test_the_dashboards_rules_and_chart_lie_in_one_place() -> None:
    """Compose mounts the directory, the chart reads it, and neither takes the GPUs' file along unasked."""
    assert sorted(path.name for path in (CHART / "files" / "rules").glob("*.yaml")) == [FILE.name]
