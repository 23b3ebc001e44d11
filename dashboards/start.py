# SPDX-License-Identifier: Apache-2.0
"""*Start*: how far a start is, how long it may still take, and what the conversion costs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import NO_YES, OLD, PHASES, bars, board, choice, lines, matrix, number, query, rows, timeline
from dashboards.series import RELEASE, ours, phase_number
from kimi_k3.errors import ExitCode
from kimi_k3.sidecar import metrics as m
from kimi_k3.words.phases import STARTING

NO_RANK = "No rank has reported yet."
NO_CONVERSION = "Nothing is converted: no rank has begun to, or the weights stay as they are."
RANK = f"{RELEASE}, rank"
ENDINGS = {code.value: (code.name.lower().replace("_", " "), "red" if code else "green") for code in ExitCode}


def dashboard() -> Dashboard:
    """The dashboard of one start."""
    return board(
        "start",
        "start",
        "From the checks to the first completion: phases, ranks, memory, and what int4 costs.",
        [choice("namespace", "Namespace", m.BUILD.name), choice("release", "Release", m.BUILD.name)],
        [
            number(
                "Phase",
                query(f"max by ({RELEASE}, kimi_k3_phase) ({ours(m.PHASE)}) == 1", "{{kimi_k3_phase}}", now=True),
                about="The phase that the deployment is in; of several nodes, each phase that one is in.",
                unit="none",
                empty=f"No supervisor has reported. {OLD}",
                width=4,
                names=True,
            ),
            number(
                "Ready",
                query(f"min by ({RELEASE}) ({ours(m.READY)})", "{{release}}", now=True),
                about="Whether traffic may come: the engine is healthy and has answered a completion in this start.",
                unit="none",
                empty="Not known: the engine has not been asked lately.",
                width=3,
                words=NO_YES,
            ),
            number(
                "In this phase for",
                query(f"time() - max by ({RELEASE}) ({ours(m.PHASE_STARTED)})", "{{release}}", now=True),
                about="Time since the present phase began.",
                unit="s",
                empty="No phase has begun.",
                width=3,
            ),
            number(
                "Left of this phase",
                query(f"max by ({RELEASE}) ({ours(m.PHASE_REMAINING)})", "{{release}}", now=True),
                about="Until the end of the present phase, at the rate measured in it.",
                unit="s",
                empty="Cannot be told in this phase, or not yet.",
                width=3,
            ),
            number(
                "Left of the start's budget",
                query(
                    f"max by ({RELEASE}) ({ours(m.START)} + {ours(m.START_BUDGET)}) - time() "
                    f"and on ({RELEASE}) max by ({RELEASE}) ({ours(m.PHASE, _starting())}) == 1",
                    "{{release}}",
                    now=True,
                ),
                about="Until the supervisor ends the start because it took longer than --start-timeout.",
                unit="s",
                empty="No start is under way.",
                width=4,
                limits={-1e9: "red", 0: "orange", 600: "green"},
            ),
            number(
                "Ranks",
                query(f"sum by ({RELEASE}) ({ours(m.RANKS)})", "reported", now=True),
                query(f"sum by ({RELEASE}) ({ours(m.WORLD_SIZE)})", "expected", now=True),
                about="Ranks (GPUs) that have reported in this start, and all of the deployment.",
                unit="none",
                empty="No supervisor has reported.",
                width=4,
            ),
            number(
                "Critical warnings",
                query(f'sum by ({RELEASE}) ({ours(m.WARNINGS, _severity("critical"))})', "{{release}}", now=True),
                about="Warnings that stand and that traffic or truth depends on; the table below names all.",
                unit="none",
                empty=OLD,
                width=3,
                limits={1: "red"},
            ),
            timeline(
                "Phases",
                query(phase_number(), "{{release}} {{instance}}"),
                about="The phase of each node over time.",
                empty=f"No supervisor has reported. {OLD}",
                width=14,
                height=5,
                words=PHASES,
            ),
            bars(
                "How long each phase took",
                query(f"max by ({RELEASE}, phase) ({ours(m.PHASE_DURATION)})", "{{release}} {{phase}}", now=True),
                about="Of the phases of this start that are over.",
                unit="s",
                empty="No phase of this start is over.",
                width=10,
                height=5,
            ),
            bars(
                "Read of the checkpoint",
                query(
                    f"sum by ({RANK}) ({ours(m.LOADING_BYTES)}) / sum by ({RANK}) ({ours(m.LOADING_BYTES_EXPECTED)})",
                    "{{release}} rank {{rank}}",
                    now=True,
                ),
                about="Share of its bytes that each rank has read. One that lags behind holds up all.",
                unit="percentunit",
                empty=NO_RANK,
                width=8,
                height=7,
                whole=1,
            ),
            bars(
                "Converted",
                query(
                    f"sum by ({RANK}) ({ours(m.CONVERSION_PROJECTIONS)}) "
                    f"/ sum by ({RANK}) ({ours(m.CONVERSION_PROJECTIONS_EXPECTED)})",
                    "{{release}} rank {{rank}}",
                    now=True,
                ),
                about="Share of its layer projections that each rank has converted to int4.",
                unit="percentunit",
                empty="Nothing is to be converted, or no supervisor has reported.",
                width=8,
                height=7,
                whole=1,
            ),
            lines(
                "Memory of ranks, and the plan",
                query(f"max by ({RANK}, kind) ({ours(m.MEMORY_USED)})", "{{release}} rank {{rank}} ({{kind}})"),
                query(f"max by ({RELEASE}, part) ({ours(m.MEMORY_PLANNED)})", "{{release}} planned: {{part}}"),
                about="What each rank uses: of the accelerator (device), or its process (host). Planned, of one rank: "
                "weights that stay, what loading takes beside them (transient), one step, the cache, the whole GPU.",
                unit="bytes",
                empty=NO_RANK,
                width=8,
                height=7,
            ),
            matrix(
                "Loss by layer",
                query(
                    f"max by (layer, projection) ({ours(m.CONVERSION_RELATIVE_MSE)})",
                    as_table=True,
                ),
                about="Sum of squared errors over sum of squared weights of each converted layer and projection, over "
                "all ranks. A layer that stands out is damaged, or has weights that int4 cannot hold. With several "
                "releases chosen, the worst of them.",
                unit="none",
                empty=NO_CONVERSION,
                width=18,
                height=7,
                row="layer",
                column="projection",
            ),
            bars(
                "Loss of the model",
                query(f"max by ({RELEASE}) ({ours(m.CONVERSION_MODEL_RELATIVE_MSE)})", "{{release}}", now=True),
                query(f"max by ({RELEASE}) ({ours(m.CONVERSION_LIMIT_RELATIVE_MSE)})", "{{release}} limit", now=True),
                about="The same over all layers converted so far, and from where on somebody should look.",
                unit="none",
                empty=NO_CONVERSION,
                width=6,
                height=7,
            ),
            rows(
                "Warnings",
                query(f"max by ({RELEASE}, severity, code) ({ours(m.WARNINGS)}) > 0", as_table=True),
                about="What stands now; the sidecar's /warnings says what to do about each.",
                empty="No warning stands.",
                width=10,
                height=6,
                columns={
                    "namespace": "namespace",
                    "release": "release",
                    "severity": "severity",
                    "code": "warning",
                    "Value": "times",
                },
            ),
            lines(
                "Progress of the phase",
                query(f"max by ({RELEASE}) ({ours(m.PHASE_PROGRESS)})", "{{release}}"),
                about="Share of the present phase that is done, where something is counted in it.",
                unit="percentunit",
                empty="Nothing is counted in this phase.",
                width=7,
                height=6,
                whole=1,
            ),
            bars(
                "Seconds since each was heard",
                query(f"time() - max by ({RELEASE}, instance) ({ours(m.HEARTBEAT)})", "supervisor {{instance}}", now=True),
                query(f"time() - max by ({RANK}) ({ours(m.RANK_HEARTBEAT)})", "{{release}} rank {{rank}}", now=True),
                about="Supervisors report every two seconds, ranks while they have something to say and then less often. "
                "After 15 s without its supervisor a start counts as dead.",
                unit="s",
                empty="No supervisor has reported.",
                width=7,
                height=6,
            ),
            number(
                "Nodes",
                query(f"sum by ({RELEASE}) ({ours(m.NODES)})", "here", now=True),
                query(f"sum by ({RELEASE}) ({ours(m.NODES_EXPECTED)})", "expected", now=True),
                about="Nodes that are part of this start, and all of the deployment.",
                unit="none",
                empty="No supervisor has reported.",
                width=4,
            ),
            number(
                "Ended with",
                query(f"max by ({RELEASE}) ({ours(m.EXIT_CODE)})", "{{release}}", now=True),
                about="Exit code of the start; the sidecar's /status says why, under ending.",
                unit="none",
                empty="The start has not ended.",
                width=4,
                words=ENDINGS,
            ),
            number(
                "Failures reported",
                query(f"sum by ({RELEASE}) ({ours(m.ENGINE_FAILURES)})", "{{release}}", now=True),
                about="By processes of the engine in this start, before they gave up.",
                unit="none",
                empty="No supervisor has reported.",
                width=4,
                limits={1: "red"},
            ),
            number(
                "Stalled",
                query(f"max by ({RELEASE}) ({ours(m.ENGINE_STALLED)})", "{{release}}", now=True),
                about="Whether requests make no progress, or a process of the engine is stopped.",
                unit="none",
                empty="No supervisor has reported.",
                width=4,
                words={0: ("no", "green"), 1: ("yes", "red")},
            ),
            number(
                "First completion took",
                query(f"max by ({RELEASE}) ({ours(m.CANARY_DURATION)})", "{{release}}", now=True),
                about="The completion that proves that this start can answer.",
                unit="s",
                empty="No completion has succeeded in this start.",
                width=4,
            ),
            number(
                "Kernels",
                query(
                    f"count by ({RELEASE}, backend) ({ours(m.BACKEND)})",
                    "{{backend}}",
                    now=True,
                ),
                about="Which kernels compute the experts, and on how many ranks.",
                unit="none",
                empty="No rank has chosen its kernels yet.",
                width=4,
            ),
        ],
    )


def _starting() -> str:
    return f'kimi_k3_phase=~"{"|".join(STARTING)}"'


def _severity(name: str) -> str:
    return f'severity="{name}"'
