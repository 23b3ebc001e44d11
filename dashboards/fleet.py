# SPDX-License-Identifier: Apache-2.0
"""*Fleet*: several deployments at a glance."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import (
    NOT_THERE,
    PHASES,
    Builder,
    board,
    lines,
    now,
    number,
    of_releases,
    over_time,
    present,
    rows,
    timeline,
)
from dashboards.series import (
    ENGINE,
    RELEASE,
    equal,
    first_nodes,
    most,
    ours,
    phase_number,
    quantile,
    rate,
    server,
    total,
)
from kimi_k3.sidecar import metrics as m

NAME = "{{namespace}} {{release}}"
NOBODY = f"No sidecar is scraped. {NOT_THERE}"
NOT_ASKED = "Not known of any: no engine has been asked lately."
SILENT = "No vLLM of these releases serves, or none is scraped."


def dashboard() -> Dashboard:
    """The dashboard of all deployments."""
    return board(
        "fleet",
        "Which releases there are, what they serve, and which want attention.",
        of_releases(),
        [*_now(), *_states(), *_tables(), *_load()],
    )


def _now() -> list[Builder]:
    return [
        number(
            "Releases",
            now(f"count(count by ({RELEASE}) ({ours(m.BUILD)}))"),
            about="Deployments whose sidecar is scraped.",
            unit="none",
            empty="No sidecar is scraped.",
            width=6,
        ),
        number(
            "Ready",
            now(f"sum({first_nodes(ours(m.READY))})", "ready"),
            now(f"count({first_nodes(ours(m.BUILD))})", "engines"),
            about="Engines that traffic may come to, and all: a release has one for each replica, on however "
            "many nodes.",
            unit="none",
            empty="No sidecar is scraped.",
            width=6,
        ),
        number(
            "Serve changed weights",
            now(f"sum({most(RELEASE, ours(m.LOSSY))})"),
            about="Of these, the ones whose experts differ from the checkpoint's values (int4).",
            unit="none",
            empty="No supervisor has reported.",
            width=6,
            limits={1: "orange"},
        ),
        number(
            "Critical warnings",
            now(f"sum({ours(m.WARNINGS, equal('severity', 'critical'))})"),
            about="That stand now, over all of these releases.",
            unit="none",
            empty="No sidecar is scraped.",
            width=6,
            limits={1: "red"},
        ),
    ]


def _states() -> list[Builder]:
    return [
        timeline(
            "Phases",
            over_time(phase_number(), f"{NAME} {{{{instance}}}}"),
            about="The phase of each node of each release.",
            empty=f"No supervisor has reported. {NOT_THERE}",
            width=14,
            height=8,
            words=PHASES,
        ),
        timeline(
            "Ready over time",
            over_time(most(ENGINE, first_nodes(ours(m.READY))), f"{NAME} {{{{instance}}}}"),
            about="Whether traffic may come to each engine.",
            empty=NOT_ASKED,
            width=10,
            height=8,
            words={0: ("not ready", "orange"), 1: ("ready", "green")},
        ),
    ]


def _tables() -> list[Builder]:
    told = "served_model_name, profile, weights, scale_rule, consent, node"
    return [
        rows(
            "What they serve",
            present(most(f"{RELEASE}, {told}", ours(m.INFO))),
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
            present(f"{most(f'{RELEASE}, severity, code', ours(m.WARNINGS))} > 0"),
            about="What stands now; /warnings of the release's sidecar says what to do about each.",
            empty="No warning stands.",
            width=10,
            height=6,
            columns={
                "namespace": "namespace",
                "release": "release",
                "severity": "severity",
                "code": "warning",
            },
        ),
    ]


def _load() -> list[Builder]:
    return [
        lines(
            "Finished requests",
            over_time(rate(RELEASE, server("vllm:request_success_total")), NAME),
            about="In a second, however they ended.",
            unit="reqps",
            empty=SILENT,
            width=6,
            height=5,
        ),
        lines(
            "First token, 95 %",
            over_time(quantile(0.95, server("vllm:time_to_first_token_seconds_bucket"), RELEASE), NAME),
            about="95 of 100 requests got their first token within this time.",
            unit="s",
            empty="No request in this time, or no vLLM serves.",
            width=6,
            height=5,
        ),
        lines(
            "Waiting",
            over_time(total(RELEASE, server("vllm:num_requests_waiting")), NAME),
            about="Requests that wait for a place.",
            unit="none",
            empty=SILENT,
            width=6,
            height=5,
        ),
        lines(
            "Fullest cache",
            over_time(most(RELEASE, server("vllm:kv_cache_usage_perc")), NAME),
            about="Use of the KV cache, of the release's engine where it is highest.",
            unit="percentunit",
            empty=SILENT,
            width=6,
            height=5,
            whole=1,
        ),
    ]
