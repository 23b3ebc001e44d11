# SPDX-License-Identifier: Apache-2.0
"""The linter finds what Prometheus would answer with nothing; all expressions of the project pass."""

from __future__ import annotations

import re

import pytest

from tests.observability.expressions import (
    Expression,
    of_autoscalers,
    of_dashboards,
    of_documents,
    rules,
    shown_labels,
    substituted,
    with_recorded,
)
from tests.observability.known import engine, known, vllm_033, vllm_package
from tests.observability.lint import lint, lint_labels, recorded
from tests.observability.vllm_source import vllm_families

WRONG = [
    ("vllm:gpu_cache_usage_perc", "no such metric; the nearest is vllm:kv_cache_usage_perc"),
    ("vllm:num_requests_swapped", "no such metric; the nearest is vllm:num_requests_waiting"),
    (
        "histogram_quantile(0.9, sum by (le) (rate(vllm:time_per_output_token_seconds_bucket[5m])))",
        "no such metric; the nearest is vllm:request_time_per_output_token_seconds_bucket",
    ),
    (
        "rate(vllm:gpu_prefix_cache_hits_total[5m])",
        "no such metric; the nearest is vllm:prefix_cache_hits_total",
    ),
    (
        "rate(vllm:gpu_prefix_cache_queries_total[5m])",
        "no such metric; the nearest is vllm:prefix_cache_queries_total",
    ),
    ("rate(vllm:gpu_prefix_cache_hit_rate[5m])", "no such metric"),
    ("rate(vllm:num_preemptions[5m])", "is a counter, whose series is vllm:num_preemptions_total"),
    ("vllm:num_preemptions_total", "is a counter, which only tells with rate() or increase()"),
    ("max_over_time(vllm:num_preemptions_total[5m])", "is a counter, which only tells with"),
    ("rate(sum(vllm:num_preemptions_total)[5m:15s])", "is a counter, which only tells with"),
    ("sum(vllm:kv_cache_usage_perc)", "sums a ratio"),
    ("sum by (release) (100 * vllm:kv_cache_usage_perc)", "sums a ratio"),
    ("sum(kimi_k3_conversion_relative_mse_ratio)", "sums a ratio"),
    ("sum_over_time(kimi_k3_phase_progress_ratio[1h])", "sums a ratio"),
    ("sum(gpu_gfx_activity)", "sums a ratio"),
    (
        "sum(rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m]))",
        "sums a ratio",
    ),
    (
        'rate(vllm:request_success_total{finish_reason="error"}[5m])',
        "has no label finish_reason; the nearest is finished_reason",
    ),
    ("avg by (model) (vllm:kv_cache_usage_perc)", "has no label model; the nearest is model_name"),
    ("max without (ranks) (kimi_k3_memory_used_bytes)", "has no label ranks; the nearest is rank"),
    (
        "kimi_k3_loading_bytes / on (rang) kimi_k3_loading_expected_bytes",
        "has no label rang; the nearest is rank",
    ),
    (
        "kimi_k3_ready * on (release) group_left (profil) kimi_k3_deployment_info",
        "has no label profil; the nearest is profile",
    ),
    ("sum by (rank) (sum by (kind) (kimi_k3_memory_used_bytes))", "has no label rank"),
    ('label_replace(kimi_k3_ready, "a", "$1", "rank", "(.*)")', "has no label rank"),
    ('kimi_k3_phase{kimi_k3_phase="running"} == 1', "kimi_k3_phase is never 'running'"),
    ('kimi_k3_phase{kimi_k3_phase=~"ready|drain"}', "the nearest value is 'draining'"),
    ('sum(kimi_k3_warnings{severity="error"})', "severity is never 'error'"),
    ("rate(kimi_k3_loading_bytes[5m])", "is a gauge, so rate() of it means nothing"),
    ("increase(kimi_k3_engine_failures[1h])", "is a gauge, so increase() of it means nothing"),
    (
        "histogram_quantile(0.9, sum by (release) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
        "keep le",
    ),
    ("sum(rate(vllm:time_to_first_token_seconds_bucket[5m]))", "keep le"),
    (
        "histogram_quantile(0.9, rate(vllm:time_to_first_token_seconds_sum[5m]))",
        "needs a histogram's _bucket series",
    ),
    ("vllm:e2e_request_latency_seconds", "is a histogram: write vllm:e2e_request_latency_seconds_bucket"),
    ("rate(vllm:iteration_tokens_total[5m])", "is a histogram: write vllm:iteration_tokens_total_bucket"),
    ("http_request_size_bytes", "is a summary: write http_request_size_bytes_sum"),
    ("kimi_k3_loading_bytes / kimi_k3_ranks", "which differ in rank; write on (...)"),
    ("kimi_k3_engine_healthy == 1 and up{release='x'} unless absent(kimi_k3_ready)", "differ in"),
    (
        "max by (instance) (vllm:num_requests_running) > max by (instance) (kimi_k3_ready)",
        "different programs tell the sides",
    ),
    ('{release="x"}', "names no metric"),
    ("sum by (release (kimi_k3_ready)", "is no PromQL"),
]

RIGHT = [
    "avg(vllm:kv_cache_usage_perc)",
    "sum(vllm:kv_cache_usage_perc > bool 0.9)",
    "count(vllm:kv_cache_usage_perc > 0.9)",
    "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m]))",
    "histogram_quantile(0.9, sum by (le, release) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
    'sum by (release) (rate(vllm:time_to_first_token_seconds_bucket{le="1.0"}[5m]))',
    "sum(rate(vllm:iteration_tokens_total_sum[5m]))",
    "absent(vllm:num_preemptions_total)",
    'absent(kimi_k3_build_info{release="x"})',
    "increase(gpu_ecc_uncorrect_total[1h]) > 0 or gpu_ecc_uncorrect_total > 0",
    "kimi_k3_loading_bytes / kimi_k3_loading_expected_bytes",
    "time() - kimi_k3_phase_started_timestamp_seconds and on (release) kimi_k3_ready == 0",
    "kimi_k3_memory_used_bytes * on (release) group_left (profile) kimi_k3_deployment_info",
    "changes(kimi_k3_start_timestamp_seconds[15m]) > 3",
    "resets(process_cpu_seconds_total[1h])",
    'label_replace(kimi_k3_ready, "of", "$1", "instance", "(.*):.*")',
    'sum(rate(http_requests_total{status=~"5.*"}[5m]))',
    "max by (release) (kimi_k3_engine_healthy) == 1 unless on (release) kimi_k3_ready == 1",
]


@pytest.mark.parametrize(("expression", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong(expression: str, message: str) -> None:
    """Each of these is taken by Prometheus without a word, or was right in an older vLLM."""
    found = lint(expression, known())
    assert any(message in one for one in found), found
    assert all("\n" not in one for one in found)


@pytest.mark.parametrize("expression", RIGHT)
def test_right(expression: str) -> None:
    """A linter that cries at what is right is soon not listened to."""
    assert lint(expression, known()) == []


def test_legend() -> None:
    """A legend of a label that the result lost shows an empty name, without an error."""
    query = "sum by (release) (kimi_k3_memory_used_bytes)"
    assert lint_labels(query, shown_labels("{{release}}"), known()) == []
    (problem,) = lint_labels(query, shown_labels("rank {{rank}}"), known())
    assert "has no label rank" in problem
    assert shown_labels("of {{ $labels.release }} {{ $value | humanize }} {{with $labels.rank}}") == (
        "release",
        "rank",
    )
    assert lint_labels("absent(kimi_k3_ready{release='x'})", ["release"], known()) == []


def test_what_a_rule_records_is_known() -> None:
    """An alert may stand on a recorded series, whose labels and nature come from its expression."""
    text = "sum by (release) (kimi_k3_loading_bytes) / sum by (release) (kimi_k3_loading_expected_bytes)"
    more = known().with_families([recorded("kimi_k3:hits:of_all", text, known())])
    assert lint("kimi_k3:hits:of_all < 0.5", more) == []
    assert "has no label engine" in lint("max by (engine) (kimi_k3:hits:of_all)", more)[0]
    assert "sums a ratio" in lint("sum(kimi_k3:hits:of_all)", more)[0]
    assert "no such metric" in lint("kimi_k3:hits:of_all", known())[0]


def test_prefix() -> None:
    """The exporter may be told to put a prefix before its names, and only its names."""
    prefixed = known().prefixed("amd_")
    assert lint("amd_gpu_used_vram", prefixed) == lint("kimi_k3_ready", prefixed) == []
    assert lint("gpu_used_vram", prefixed)


def test_variables() -> None:
    """As Grafana replaces them; one that the tests do not know is an error here."""
    assert substituted('${prefix}gpu_health{hostname=~"$hostname"}') == 'gpu_health{hostname=~".*"}'
    assert substituted("rate(a[$__rate_interval])") == "rate(a[1m])"
    with pytest.raises(KeyError):
        substituted("$unknown")


def test_vllm_is_read_right() -> None:
    """Where both versions have a metric it is of one type; what only one of them has is not known."""
    installed, newer = vllm_families(vllm_package()), vllm_033()
    assert {name: kind for name, (kind, _) in installed.items() if name in newer} == {
        name: kind for name, kind in newer.items() if name in installed
    }
    assert installed["vllm:request_success"] == (
        "counter",
        frozenset({"model_name", "engine", "finished_reason"}),
    )
    assert installed["vllm:spec_decode_num_drafts"] == ("counter", frozenset({"model_name", "engine"}))
    names = {family.name for family in engine()}
    assert "vllm:request_success_total" in names
    assert "vllm:umbp_transfer_failed_total" not in names, "0.33.0 has it, the installed one has not"
    assert "vllm:kv_offload_total_bytes_total" not in names, "the installed one has it, 0.33.0 has not"


def everything() -> list[Expression]:
    """Every expression of the project."""
    return [
        *of_dashboards(),
        *(rule.expression for rule in rules()),
        *of_documents(),
        *of_autoscalers(),
    ]


@pytest.mark.parametrize("expression", everything(), ids=lambda one: re.sub(r"\W+", "-", one.where))
def test_every_expression_is_right(expression: Expression) -> None:
    """Dashboards, rules, documents and examples of autoscalers name only what there is."""
    there = with_recorded(known())
    assert lint(expression.text, there) == []
    assert lint_labels(expression.text, expression.shown, there) == []
