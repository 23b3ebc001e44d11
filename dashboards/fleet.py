# SPDX-License-Identifier: Apache-2.0
"""*Fleet*: several deployments at a glance."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import OLD, PHASES, board, choice, lines, number, query, rows, timeline
from dashboards.series import RATE, RELEASE, ours, phase_number, server
from kimi_k3.sidecar import metrics as m

NAME = "{{namespace}} {{release}}"
SILENT = "No vLLM of these releases serves, or none is scraped."


def dashboard() -> Dashboard:
    """The dashboard of all deployments."""
    first_token = f"rate({server('vllm:time_to_first_token_seconds_bucket')}[{RATE}])"
    return board(
        "fleet",
        "fleet",
        "Which releases there are, which serve what, and which want attention.",
        [choice("namespace", "Namespace", m.BUILD.name), choice("release", "Release", m.BUILD.name)],
        [
            number(
                "Releases",
                query(f"count(count by ({RELEASE}) ({ours(m.BUILD)}))", now=True),
                about="Deployments whose sidecar is scraped.",
                unit="none",
                empty=f"No sidecar is scraped. {OLD}",
                width=6,
            ),
            number(
                "Ready",
                query(f"sum(min by ({RELEASE}) ({ours(m.READY)}))", now=True),
                about="Of these, the ones that traffic may come to.",
                unit="none",
                empty="Not known of any: no engine has been asked lately.",
                width=6,
            ),
            number(
                "Serve changed weights",
                query(f"sum(max by ({RELEASE}) ({ours(m.LOSSY)}))", now=True),
                about="Of these, the ones whose experts differ from the checkpoint's values (int4).",
                unit="none",
                empty="Not known of any.",
                width=6,
                limits={1: "orange"},
            ),
            number(
                "Critical warnings",
                query(f"""sum({ours(m.WARNINGS, 'severity="critical"')})""", now=True),
                about="That stand now, over all of these releases.",
                unit="none",
                empty=f"No sidecar is scraped. {OLD}",
                width=6,
                limits={1: "red"},
            ),
            timeline(
                "Phases",
                query(phase_number(), "{{namespace}} {{release}} {{instance}}"),
                about="The phase of each node of each release.",
                empty=f"No supervisor has reported. {OLD}",
                width=14,
                height=8,
                words=PHASES,
            ),
            timeline(
                "Ready",
                query(f"min by ({RELEASE}) ({ours(m.READY)})", NAME),
                about="Whether traffic may come.",
                empty="Not known of any: no engine has been asked lately.",
                width=10,
                height=8,
                words={0: ("not ready", "orange"), 1: ("ready", "green")},
            ),
            rows(
                "What they serve",
                query(f"max by ({RELEASE}, served_model_name, profile, weights, scale_rule, consent, node) ({ours(m.INFO)})", as_table=True),
                about="By the supervisor's record; consent says who agreed to changed weights.",
                empty="No supervisor has reported.",
                width=14,
                height=6,
                columns={
                    "namespace": "namespace",
                    "release": "release",
                    "node": "node",
                    "served_model_name": "model",
                    "profile": "profile",
                    "weights": "weights",
                    "scale_rule": "scale rule",
                    "consent": "consent",
                },
            ),
            rows(
                "Warnings",
                query(f"max by ({RELEASE}, severity, code) ({ours(m.WARNINGS)}) > 0", as_table=True),
                about="What stands now; /warnings of the release's sidecar says what to do about each.",
                empty="No warning stands.",
                width=10,
                height=6,
                columns={"namespace": "namespace", "release": "release", "severity": "severity", "code": "warning"},
            ),
            lines(
                "Finished requests",
                query(f"sum by ({RELEASE}) (rate({server('vllm:request_success_total')}[{RATE}]))", NAME),
                about="In a second, however they ended.",
                unit="reqps",
                empty=SILENT,
                width=6,
                height=5,
            ),
            lines(
                "First token, 95 %",
                query(f"histogram_quantile(0.95, sum by (le, {RELEASE}) ({first_token})) >= 0", NAME),
                about="95 of 100 requests got their first token within this time.",
                unit="s",
                empty="No request in this time, or no vLLM serves.",
                width=6,
                height=5,
            ),
            lines(
                "Waiting",
                query(f"sum by ({RELEASE}) ({server('vllm:num_requests_waiting')})", NAME),
                about="Requests that wait for a place.",
                unit="none",
                empty=SILENT,
                width=6,
                height=5,
            ),
            lines(
                "Fullest cache",
                query(f"max by ({RELEASE}) ({server('vllm:kv_cache_usage_perc')})", NAME),
                about="Use of the KV cache, of the release's engine where it is highest.",
                unit="percentunit",
                empty=SILENT,
                width=6,
                height=5,
                whole=1,
            ),
        ],
    )
