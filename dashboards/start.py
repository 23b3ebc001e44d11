# SPDX-License-Identifier: Apache-2.0
"""*Start*: how far a start is, how long it may still take, and what the conversion costs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import (
    NO_YES,
    NOT_THERE,
    PHASES,
    Builder,
    bars,
    board,
    by_ten,
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
    ONES,
    RELEASE,
    TENS,
    any_of,
    equal,
    first_nodes,
    least,
    most,
    ours,
    part,
    phase_number,
    split,
    total,
)
from kimi_k3.errors import ExitCode
from kimi_k3.sidecar import metrics as m
from kimi_k3.words.phases import STARTING
from kimi_k3.words.weights import Projection, ScaleRule

NOBODY = f"No supervisor has reported. {NOT_THERE}"
NO_RANK = "No rank has reported yet."
NO_CONVERSION = "Nothing is converted: no rank has begun to, or the weights stay as they are."
RANK = f"{ENGINE}, rank"
NAME, RANK_NAME = "{{release}} {{instance}}", "{{release}} {{instance}} {{rank}}"
"""Of several replicas each has a sidecar, and ranks from 0 on."""

REDDEST = max(rule.limit_relative_mse for rule in ScaleRule)
ENDINGS = {code.value: (code.name.lower().replace("_", " "), "red" if code else "green") for code in ExitCode}


def dashboard() -> Dashboard:
    """The dashboard of one start."""
    return board(
        "start",
        "From the checks to the first completion: phases, ranks, memory, and what int4 costs.",
        of_releases(),
        [*_now(), *_phases(), *_ranks(), *_loss(), *_trouble()],
    )


def _now() -> list[Builder]:
    budget_left = f"{ours(m.START)} + {ours(m.START_BUDGET)} - time()"
    starting = most(ENGINE, ours(m.PHASE, any_of("kimi_k3_phase", STARTING)))
    return [
        number(
            "Phase",
            now(phase_number(), NAME),
            about="The phase that each node is in.",
            unit="none",
            empty="No supervisor has reported.",
            width=4,
            words=PHASES,
        ),
        number(
            "Ready",
            now(most(ENGINE, first_nodes(ours(m.READY))), NAME),
            about="Whether traffic may come to each engine: it is healthy and has answered in this start.",
            unit="none",
            empty="Engine not asked yet.",
            width=3,
            words=NO_YES,
        ),
        number(
            "In this phase for",
            now(f"time() - {most(ENGINE, ours(m.PHASE_STARTED))}", NAME),
            about="Time since the present phase began.",
            unit="s",
            empty="No phase has begun.",
            width=3,
        ),
        number(
            "Left of this phase",
            now(most(ENGINE, ours(m.PHASE_REMAINING)), NAME),
            about="Until the end of the present phase, at the rate measured in it.",
            unit="s",
            empty="Cannot be told (yet).",
            width=3,
        ),
        number(
            "Left of the start's budget",
            now(f"{most(ENGINE, budget_left)} and on ({ENGINE}) {starting} == 1", NAME),
            about="Until the supervisor ends the start because it took longer than --start-timeout.",
            unit="s",
            empty="No start is under way.",
            width=4,
            limits={-1e9: "red", 0: "orange", 600: "green"},
        ),
        number(
            "Ranks",
            now(total(RELEASE, ours(m.RANKS)), "{{release}} reported"),
            now(total(RELEASE, ours(m.WORLD_SIZE)), "{{release}} expected"),
            about="Ranks (GPUs) that have reported in this start, and all of the deployment.",
            unit="none",
            empty="No supervisor has reported.",
            width=4,
        ),
        number(
            "Critical warnings",
            now(total(RELEASE, ours(m.WARNINGS, equal("severity", "critical"))), "{{release}}"),
            about="Warnings that stand and that traffic or truth depends on; the table below names all.",
            unit="none",
            empty="No sidecar scraped.",
            width=3,
            limits={1: "red"},
        ),
    ]


def _phases() -> list[Builder]:
    return [
        timeline(
            "Phases",
            over_time(phase_number(), NAME),
            about="The phase of each node over time.",
            empty=NOBODY,
            width=14,
            height=5,
            words=PHASES,
        ),
        bars(
            "How long each phase took",
            now(most(f"{RELEASE}, phase", ours(m.PHASE_DURATION)), "{{release}} {{phase}}"),
            about="Of the phases of this start that are over.",
            unit="s",
            empty="No phase of this start is over.",
            width=10,
            height=5,
        ),
    ]


def _ranks() -> list[Builder]:
    return [
        bars(
            "Read of the checkpoint",
            now(part(ours(m.LOADING_BYTES), ours(m.LOADING_BYTES_EXPECTED)), RANK_NAME),
            about="Share of its bytes that each rank (the last number) has read. One that lags behind holds "
            "up all.",
            unit="percentunit",
            empty=NO_RANK,
            width=8,
            height=7,
            whole=1,
        ),
        bars(
            "Converted",
            now(part(ours(m.CONVERSION_PROJECTIONS), ours(m.CONVERSION_PROJECTIONS_EXPECTED)), RANK_NAME),
            about="Share of its layer projections that each rank (the last number) has converted to int4.",
            unit="percentunit",
            empty="Nothing is to be converted, or no supervisor has reported.",
            width=8,
            height=7,
            whole=1,
        ),
        lines(
            "Memory of ranks, and the plan",
            over_time(most(f"{RELEASE}, kind", ours(m.MEMORY_USED)), "{{release}} fullest ({{kind}})"),
            over_time(least(f"{RELEASE}, kind", ours(m.MEMORY_USED)), "{{release}} emptiest ({{kind}})"),
            over_time(most(f"{RELEASE}, part", ours(m.MEMORY_PLANNED)), "{{release}} planned: {{part}}"),
            about="What the fullest rank and the emptiest use: of the accelerator (device), or of the "
            "machine by their processes (host). They should be alike; /memory of the sidecar tells each. "
            "Planned, of one rank: weights that stay, what loading takes beside them (transient), one step "
            "of the model, the cache, the whole GPU (limit).",
            unit="bytes",
            empty=NO_RANK,
            width=8,
            height=7,
        ),
    ]


def _loss() -> list[Builder]:
    return [
        *(
            by_ten(
                f"Loss by layer: {projection}",
                present(most(f"{TENS}, {ONES}", split("layer", _loss_of(projection)))),
                about="Sum of squared errors over sum of squared weights of each converted layer, over all "
                "ranks: layer 47 is in the row from 40, under +7. A layer that stands out is damaged, or has "
                f"weights that int4 cannot hold. From {REDDEST:g} on, the limit of the rule that loses most, "
                "it is as red as can be. Of several engines it is the worst.",
                unit="none",
                empty=NO_CONVERSION,
                width=10,
                height=12,
                reddest=REDDEST,
                decimals=4,
            )
            for projection in Projection
        ),
        bars(
            "Loss of the model",
            now(most(RELEASE, ours(m.CONVERSION_MODEL_RELATIVE_MSE)), "{{release}}"),
            now(most(RELEASE, ours(m.CONVERSION_LIMIT_RELATIVE_MSE)), "{{release}} limit"),
            about="The same over all layers converted so far, and from where on somebody should look.",
            unit="none",
            empty=NO_CONVERSION,
            width=4,
            height=12,
        ),
    ]


def _loss_of(projection: Projection) -> str:
    return ours(m.CONVERSION_RELATIVE_MSE, equal("projection", projection))


def _trouble() -> list[Builder]:
    return [
        rows(
            "Warnings",
            present(f"{most(f'{RELEASE}, severity, code', ours(m.WARNINGS))} > 0"),
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
            over_time(most(ENGINE, ours(m.PHASE_PROGRESS)), NAME),
            about="Share of the present phase that is done, where something is counted in it.",
            unit="percentunit",
            empty="Nothing is counted in this phase.",
            width=7,
            height=6,
            whole=1,
        ),
        bars(
            "Not heard for",
            now(f"time() - {most(ENGINE, ours(m.HEARTBEAT))}", f"{NAME} supervisor"),
            now(f"time() - {most(RANK, ours(m.RANK_HEARTBEAT))}", RANK_NAME),
            about="Supervisors report every two seconds, ranks when they have something to say. After 15 s "
            "without its supervisor a start counts as dead.",
            unit="s",
            empty=NOBODY,
            width=7,
            height=6,
        ),
        number(
            "Nodes",
            now(total(RELEASE, ours(m.NODES)), "{{release}} here"),
            now(total(RELEASE, ours(m.NODES_EXPECTED)), "{{release}} expected"),
            about="Nodes that are part of this start, and all of the deployment.",
            unit="none",
            empty="No supervisor has reported.",
            width=4,
        ),
        number(
            "Ended with",
            now(most(ENGINE, ours(m.EXIT_CODE)), NAME),
            about="Exit code of each engine's start; the sidecar's /status says why, under ending.",
            unit="none",
            empty="It has not ended.",
            width=4,
            words=ENDINGS,
        ),
        number(
            "Failures reported",
            now(total(RELEASE, ours(m.ENGINE_FAILURES)), "{{release}}"),
            about="By processes of the engine in this start, before they gave up.",
            unit="none",
            empty="No supervisor has reported.",
            width=4,
            limits={1: "red"},
        ),
        number(
            "Stalled",
            now(most(ENGINE, ours(m.ENGINE_STALLED)), NAME),
            about="Whether requests make no progress, or a process of the engine is stopped.",
            unit="none",
            empty="No supervisor has reported.",
            width=4,
            words={0: ("no", "green"), 1: ("yes", "red")},
        ),
        number(
            "First completion took",
            now(most(ENGINE, ours(m.CANARY_DURATION)), NAME),
            about="The completion that proves that this start can answer.",
            unit="s",
            empty="No completion yet.",
            width=4,
        ),
        number(
            "Kernels",
            now(f"count by ({RELEASE}, backend) ({ours(m.BACKEND)})", "{{release}} {{backend}}"),
            about="Which kernels compute the experts, and on how many ranks.",
            unit="none",
            empty="No rank has chosen yet.",
            width=4,
            named=True,
        ),
    ]
