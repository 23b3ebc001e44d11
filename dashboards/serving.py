# SPDX-License-Identifier: Apache-2.0
"""*Serving*: what vLLM's users wait for, and why."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import Builder, board, choice, lines, now, number, of_releases, over_time
from dashboards.series import (
    MODEL,
    QUANTILES,
    RELEASE,
    any_of,
    most,
    ours,
    part,
    quantile,
    rate,
    server,
    total,
    vllm,
)
from kimi_k3.sidecar import metrics as m

SILENT = "vLLM tells nothing: it does not serve yet, is not scraped, or has no such model or engine."
NO_DRAFT = "No draft: the profile has no speculative decoding, or vLLM does not serve yet."
IDLE = "No request in this time, or vLLM does not serve yet."
NAME = "{{release}} {{model_name}}/{{engine}}"
RUNNING, WAITING, CACHE = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"


def dashboard() -> Dashboard:
    """The dashboard of vLLM."""
    return board(
        "serving",
        "Latencies, load, cache and outcomes, by model and engine. The metrics are vLLM's own.",
        [
            *of_releases(),
            choice("model_name", "Model", f"vllm:{RUNNING}"),
            choice("engine", "Engine", f"vllm:{RUNNING}"),
        ],
        [*_now(), *_latencies(), *_load(), *_drafts(), *_outcomes()],
    )


def _now() -> list[Builder]:
    failed = vllm("request_success_total", any_of("finished_reason", ("error", "abort")))
    return [
        number(
            "Running",
            now(total(RELEASE, vllm(RUNNING)), "{{release}}"),
            about="Requests that are computed now.",
            unit="none",
            empty="vLLM does not serve (yet).",
            width=4,
        ),
        number(
            "Waiting",
            now(total(RELEASE, vllm(WAITING)), "{{release}}"),
            about="Requests that wait for a place.",
            unit="none",
            empty="vLLM does not serve (yet).",
            width=4,
            limits={1: "orange"},
        ),
        number(
            "Fullest cache",
            now(most(RELEASE, vllm(CACHE)), "{{release}}"),
            about="Use of the KV cache where it is highest. Near 100 % requests are preempted.",
            unit="percentunit",
            empty="vLLM does not serve (yet).",
            width=4,
            limits={0.8: "orange", 0.95: "red"},
        ),
        number(
            "First token, 95 %",
            now(quantile(0.95, vllm("time_to_first_token_seconds_bucket"), RELEASE), "{{release}}"),
            about="95 of 100 requests got their first token within this time.",
            unit="s",
            empty="No request in this time.",
            width=4,
        ),
        number(
            "Tokens written",
            now(rate(RELEASE, vllm("generation_tokens_total")), "{{release}}"),
            about="Tokens generated in a second, over all requests.",
            unit="cps",
            empty="vLLM does not serve (yet).",
            width=4,
        ),
        number(
            "Failed requests",
            now(rate(RELEASE, failed), "{{release}}"),
            about="Requests in a second that ended by an error or that the client gave up.",
            unit="reqps",
            empty="vLLM does not serve (yet).",
            width=4,
            limits={0.001: "orange"},
        ),
    ]


def _latencies() -> list[Builder]:
    asked = {
        "Time to the first token": (
            "time_to_first_token_seconds",
            "From a request's arrival to its first token: waiting, and reading the prompt.",
        ),
        "Time between tokens": (
            "inter_token_latency_seconds",
            "Between one token of a request and the next.",
        ),
        "Whole request": ("e2e_request_latency_seconds", "From a request's arrival to its last token."),
        "In the queue": ("request_queue_time_seconds", "What a request waited until it was computed."),
    }
    return [
        lines(
            title,
            *(over_time(quantile(q, vllm(f"{name}_bucket"), MODEL), f"{NAME} {q:.0%}") for q in QUANTILES),
            about=f"{about} Within this time for 50, 95 and 99 of 100.",
            unit="s",
            empty=IDLE,
            width=6,
            height=7,
        )
        for title, (name, about) in asked.items()
    ]


def _load() -> list[Builder]:
    hits, asked = vllm("prefix_cache_hits_total"), vllm("prefix_cache_queries_total")
    return [
        lines(
            "Running and waiting",
            over_time(total(MODEL, vllm(RUNNING)), f"{NAME} running"),
            over_time(total(MODEL, vllm(WAITING)), f"{NAME} waiting"),
            about="Requests that are computed, and those that wait.",
            unit="none",
            empty=SILENT,
            width=8,
            height=6,
        ),
        lines(
            "Use of the KV cache",
            over_time(most(MODEL, vllm(CACHE)), NAME),
            about="Share of the cache's blocks that requests hold.",
            unit="percentunit",
            empty=SILENT,
            width=8,
            height=6,
            whole=1,
        ),
        lines(
            "Tokens in a second",
            over_time(rate(MODEL, vllm("prompt_tokens_total")), f"{NAME} read"),
            over_time(rate(MODEL, vllm("generation_tokens_total")), f"{NAME} written"),
            about="Tokens of prompts that were taken in, and tokens generated.",
            unit="cps",
            empty=SILENT,
            width=8,
            height=6,
        ),
        lines(
            "Prefix cache",
            over_time(rate(MODEL, asked), f"{NAME} asked for"),
            over_time(rate(MODEL, hits), f"{NAME} found"),
            about="Tokens of prompts that were looked for in the cache, and those that were there and need "
            "not be computed again. Both are 0 where the profile has no prefix caching.",
            unit="cps",
            empty=SILENT,
            width=8,
            height=6,
        ),
        lines(
            "Found in the prefix cache",
            over_time(part(rate(MODEL, hits), rate(MODEL, asked)), NAME),
            about="Of the tokens that were looked for in the prefix cache, the share that was there.",
            unit="percentunit",
            empty="Nothing was looked for: no request in this time, or the profile has no prefix caching.",
            width=8,
            height=6,
            whole=1,
        ),
        lines(
            "Preemptions",
            over_time(rate(MODEL, vllm("num_preemptions_total")), NAME),
            about="Requests in a second that lost their place in the cache to others and start again.",
            unit="cps",
            empty=SILENT,
            width=8,
            height=6,
        ),
    ]


def _drafts() -> list[Builder]:
    rounds, drafted, accepted = (
        rate(MODEL, vllm(f"spec_decode_num_{what}_total"))
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return [
        lines(
            "Accepted of the draft",
            over_time(part(accepted, drafted), NAME),
            about="Of the tokens that the draft model proposed, the share that the model accepted.",
            unit="percentunit",
            empty=NO_DRAFT,
            width=8,
            height=6,
            whole=1,
        ),
        lines(
            "Accepted tokens of a draft",
            over_time(part(accepted, rounds), NAME),
            about="Tokens that a step of the model gains by the draft, beside the one that it makes itself.",
            unit="none",
            empty=NO_DRAFT,
            width=8,
            height=6,
        ),
        lines(
            "Drafted tokens",
            over_time(drafted, f"{NAME} drafted"),
            over_time(accepted, f"{NAME} accepted"),
            about="Tokens in a second that the draft model proposed, and those that the model accepted.",
            unit="cps",
            empty=NO_DRAFT,
            width=8,
            height=6,
        ),
    ]


def _outcomes() -> list[Builder]:
    # It stands before the engines, so it has no label for them.
    refused = server("vllm:admission_rejections_total", 'model_name=~"$model_name"')
    return [
        lines(
            "Finished requests",
            over_time(
                rate(f"{RELEASE}, finished_reason", vllm("request_success_total")),
                "{{release}} {{finished_reason}}",
            ),
            about="How requests ended: at a stop or at their length, by an error, or given up by the client.",
            unit="reqps",
            empty=SILENT,
            width=6,
            height=6,
        ),
        lines(
            "HTTP answers",
            over_time(rate(f"{RELEASE}, status", server("http_requests_total")), "{{release}} {{status}}"),
            about="By status. Refused requests (4xx) never reach the engine: no other panel counts them.",
            unit="reqps",
            empty=IDLE,
            width=6,
            height=6,
        ),
        lines(
            "Why requests wait",
            over_time(
                total(f"{RELEASE}, reason", vllm("num_requests_waiting_by_reason")), "{{release}} {{reason}}"
            ),
            about="For a place (capacity), or for something else that is not ready yet (deferred).",
            unit="none",
            empty=SILENT,
            width=6,
            height=6,
        ),
        lines(
            "Refused for a full queue",
            over_time(rate(f"{RELEASE}, reason", refused), "{{release}} {{reason}}"),
            about="Requests in a second that a limit of the queue kept out (--max-num-queued-reqs, -tokens).",
            unit="reqps",
            empty=SILENT,
            width=6,
            height=6,
        ),
        _lengths("Length of prompts", "request_prompt_tokens", "Tokens of a request's prompt."),
        _lengths("Length of answers", "request_generation_tokens", "Tokens that a request got."),
        lines(
            "Answer to /health",
            over_time(most(RELEASE, ours(m.ENGINE_CHECK_DURATION)), "{{release}}"),
            about="How long vLLM took to answer the sidecar; one that is short of processor answers late.",
            unit="s",
            empty="The engine has not been asked lately.",
            width=8,
            height=6,
        ),
    ]


def _lengths(title: str, histogram: str, about: str) -> Builder:
    buckets = vllm(f"{histogram}_bucket")
    return lines(
        title,
        *(over_time(quantile(q, buckets, RELEASE), f"{{{{release}}}} {q:.0%}") for q in QUANTILES),
        about=f"{about} At most so many for 50, 95 and 99 of 100.",
        unit="none",
        empty=IDLE,
        width=8,
        height=6,
    )
