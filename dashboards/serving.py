# SPDX-License-Identifier: Apache-2.0
"""*Serving*: what vLLM's users wait for, and why."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import Builder, board, choice, lines, number, query
from dashboards.series import MODEL, QUANTILES, RATE, RELEASE, ours, quantile, rate, server, vllm
from kimi_k3.sidecar import metrics as m

SILENT = "vLLM tells nothing: it does not serve yet, is not scraped, or has no such model or engine."
IDLE = "No request in this time, or vLLM does not serve yet."
NAME = "{{release}} {{model_name}}/{{engine}}"


def dashboard() -> Dashboard:
    """The dashboard of vLLM."""
    running = vllm("num_requests_running").partition("{")[0]
    return board(
        "serving",
        "serving",
        "Latencies, load, cache and outcomes, by model and engine. The metrics are vLLM's own.",
        [
            choice("namespace", "Namespace", m.BUILD.name),
            choice("release", "Release", m.BUILD.name),
            choice("model_name", "Model", running),
            choice("engine", "Engine", running),
        ],
        [
            number(
                "Running",
                query(f"sum by ({RELEASE}) ({vllm('num_requests_running')})", "{{release}}", now=True),
                about="Requests that are computed now.",
                unit="none",
                empty=SILENT,
                width=4,
            ),
            number(
                "Waiting",
                query(f"sum by ({RELEASE}) ({vllm('num_requests_waiting')})", "{{release}}", now=True),
                about="Requests that wait for a place.",
                unit="none",
                empty=SILENT,
                width=4,
                limits={1: "orange"},
            ),
            number(
                "Fullest cache",
                query(f"max by ({RELEASE}) ({vllm('kv_cache_usage_perc')})", "{{release}}", now=True),
                about="Use of the KV cache, of the engine where it is highest. Near 100 % requests are preempted.",
                unit="percentunit",
                empty=SILENT,
                width=4,
                limits={0.8: "orange", 0.95: "red"},
            ),
            number(
                "First token, 95 %",
                query(quantile(0.95, "time_to_first_token_seconds", RELEASE), "{{release}}", now=True),
                about="95 of 100 requests got their first token within this time.",
                unit="s",
                empty=IDLE,
                width=4,
            ),
            number(
                "Tokens written",
                query(rate("generation_tokens", RELEASE), "{{release}}", now=True),
                about="Tokens generated in a second, over all requests.",
                unit="cps",
                empty=SILENT,
                width=4,
            ),
            number(
                "Failed requests",
                query(
                    f"sum by ({RELEASE}) (rate({_finished(_reason('error|abort'))}[{RATE}]))",
                    "{{release}}",
                    now=True,
                ),
                about="Requests in a second that ended by an error or that the client gave up.",
                unit="reqps",
                empty=SILENT,
                width=4,
                limits={0.001: "orange"},
            ),
            *_quantiles(),
            lines(
                "Running and waiting",
                query(f"sum by ({MODEL}) ({vllm('num_requests_running')})", f"{NAME} running"),
                query(f"sum by ({MODEL}) ({vllm('num_requests_waiting')})", f"{NAME} waiting"),
                about="Requests that are computed, and those that wait.",
                unit="none",
                empty=SILENT,
                width=8,
                height=6,
            ),
            lines(
                "Use of the KV cache",
                query(f"max by ({MODEL}) ({vllm('kv_cache_usage_perc')})", NAME),
                about="Share of the cache's blocks that requests hold.",
                unit="percentunit",
                empty=SILENT,
                width=8,
                height=6,
                whole=1,
            ),
            lines(
                "Tokens in a second",
                query(rate("prompt_tokens"), f"{NAME} read"),
                query(rate("generation_tokens"), f"{NAME} written"),
                about="Tokens of prompts that were computed, and tokens generated.",
                unit="cps",
                empty=SILENT,
                width=8,
                height=6,
            ),
            lines(
                "Prefix cache",
                query(f"{rate('prefix_cache_hits')} / ({rate('prefix_cache_queries')} > 0)", NAME),
                about="Share of the prompts' tokens that were in the cache already and were not computed again.",
                unit="percentunit",
                empty="No prompt in this time, or vLLM does not serve yet.",
                width=8,
                height=6,
                whole=1,
            ),
            lines(
                "Preemptions",
                query(rate("num_preemptions"), NAME),
                about="Requests in a second that lost their place in the cache to others and start again.",
                unit="cps",
                empty=SILENT,
                width=8,
                height=6,
            ),
            lines(
                "Finished requests",
                query(f"sum by ({RELEASE}, finished_reason) (rate({_finished()}[{RATE}]))", "{{release}} {{finished_reason}}"),
                about="How requests ended: at their stop or their length, by an error, or given up by the client.",
                unit="reqps",
                empty=SILENT,
                width=8,
                height=6,
            ),
            lines(
                "HTTP answers",
                query(
                    f"sum by ({RELEASE}, status) (rate({server('http_requests_total')}[{RATE}]))",
                    "{{release}} {{status}}",
                ),
                about="By status. Refused requests (4xx) never reach the engine, so the panel beside does not count them.",
                unit="reqps",
                empty=IDLE,
                width=8,
                height=6,
            ),
            lines(
                "Why requests wait",
                query(
                    f"sum by ({RELEASE}, reason) ({vllm('num_requests_waiting_by_reason')})",
                    "{{release}} {{reason}}",
                ),
                about="For a place (capacity), or for something else that is not ready yet (deferred).",
                unit="none",
                empty=SILENT,
                width=8,
                height=6,
            ),
            lines(
                "Refused for a full queue",
                query(
                    f"sum by ({RELEASE}, reason) (rate({server('vllm:admission_rejections_total')}[{RATE}]))",
                    "{{release}} {{reason}}",
                ),
                about="Requests in a second that a limit of the queue kept out (--max-num-queued-reqs, -tokens).",
                unit="reqps",
                empty=SILENT,
                width=8,
                height=6,
            ),
            _lengths("Length of prompts", "request_prompt_tokens", "Tokens of a request's prompt."),
            _lengths("Length of answers", "request_generation_tokens", "Tokens that a request got."),
            lines(
                "Accepted of what was guessed",
                query(
                    f"{rate('spec_decode_num_accepted_tokens')} / ({rate('spec_decode_num_draft_tokens')} > 0)",
                    NAME,
                ),
                about="Share of the draft's tokens that the model kept. Only profiles with speculative decoding have it.",
                unit="percentunit",
                empty="Nothing was guessed: the profile has no speculative decoding, or there was no request.",
                width=8,
                height=6,
                whole=1,
            ),
            lines(
                "Tokens for each guess",
                query(
                    f"1 + {rate('spec_decode_num_accepted_tokens')} / ({rate('spec_decode_num_drafts')} > 0)",
                    NAME,
                ),
                about="Tokens that a step yields: the guessed ones that were kept, and the model's own.",
                unit="none",
                empty="Nothing was guessed: the profile has no speculative decoding, or there was no request.",
                width=8,
                height=6,
            ),
            lines(
                "Answer to /health",
                query(f"max by ({RELEASE}) ({ours(m.ENGINE_CHECK_DURATION)})", "{{release}}"),
                about="How long vLLM took to answer the sidecar; a server that is short of processor answers late.",
                unit="s",
                empty="The engine has not been asked lately.",
                width=8,
                height=6,
            ),
        ],
    )


def _quantiles() -> list[Builder]:
    asked = {
        "Time to the first token": (
            "time_to_first_token_seconds",
            "From the request's arrival to its first token: waiting, and reading the prompt.",
        ),
        "Time between tokens": (
            "inter_token_latency_seconds",
            "Between one token and the next of a request.",
        ),
        "Whole request": ("e2e_request_latency_seconds", "From a request's arrival to its last token."),
        "In the queue": ("request_queue_time_seconds", "What a request waited until it was computed."),
    }
    return [
        lines(
            title,
            *(query(quantile(share, name), f"{NAME} {share:.0%}") for share in QUANTILES),
            about=f"{about} Within this time for 50, 95 and 99 of 100.",
            unit="s",
            empty=IDLE,
            width=6,
            height=7,
        )
        for title, (name, about) in asked.items()
    ]


def _lengths(title: str, histogram: str, about: str) -> Builder:
    return lines(
        title,
        *(query(quantile(share, histogram, RELEASE), f"{{{{release}}}} {share:.0%}") for share in (0.5, 0.95)),
        about=f"{about} At most so many for 50 and 95 of 100.",
        unit="none",
        empty=IDLE,
        width=8,
        height=6,
    )


def _finished(*matchers: str) -> str:
    return vllm("request_success_total", *matchers)


def _reason(names: str) -> str:
    return f'finished_reason=~"{names}"'
