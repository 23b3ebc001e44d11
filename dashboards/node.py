# SPDX-License-Identifier: Apache-2.0
"""*Node*: GPUs as AMD's device-metrics-exporter sees them, the machine's memory as our sidecar does."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import (
    NOT_THERE,
    Builder,
    bars,
    board,
    choice,
    lines,
    now,
    number,
    of_releases,
    over_time,
    timeline,
    written,
)
from dashboards.series import ENGINE, PREFIX, RELEASE, gpu, least, most, ours, total
from kimi_k3.sidecar import metrics as m

SILENT = "AMD's device-metrics-exporter is not scraped, or has another prefix (above)."
NO_GROUP = "The sidecar is in no control group whose memory is counted."
HOST = "hostname"
GPU = "hostname, gpu_id, gpu_partition_id"
NAME = "{{hostname}} {{gpu_id}}.{{gpu_partition_id}}"
HELD_BACK = {
    "processor_hot": "processor",
    "ppt": "power limit",
    "socket_thermal": "socket",
    "vr_thermal": "voltage regulators",
    "hbm_thermal": "memory",
}
"""Part of the name of ``gpu_violation_*_residency_percentage``, and what it is about."""

ERRORS = {"uncorrect": "uncorrectable", "deferred": "deferred", "correct": "corrected"}


def dashboard() -> Dashboard:
    """The dashboard of the machines."""
    return board(
        "node",
        "GPUs by AMD's device-metrics-exporter, which the chart does not install; memory by the sidecar.",
        [
            *of_releases(),
            written(
                "prefix",
                "Exporter's prefix",
                "MetricsFieldPrefix of its configuration, as amd_; empty unless that is set.",
            ),
            choice("hostname", "Host", f"{PREFIX}gpu_health"),
        ],
        [*_now(), *_gpus(), *_errors(), *_machine()],
    )


def _now() -> list[Builder]:
    return [
        number(
            "GPUs",
            now(total(HOST, gpu("gpu_nodes_total")), "{{hostname}}"),
            about="GPUs of each host.",
            unit="none",
            empty="AMD's exporter not scraped.",
            width=4,
        ),
        number(
            "Not healthy",
            now(total(HOST, f"{gpu('gpu_health')} == bool 0"), "{{hostname}}"),
            about="GPUs with errors beyond the exporter's thresholds, or with fatal records of the driver.",
            unit="none",
            empty="AMD's exporter not scraped.",
            width=4,
            limits={1: "red"},
        ),
        number(
            "Fullest memory",
            now(most(HOST, f"{gpu('gpu_used_vram')} / {gpu('gpu_total_vram')}"), "{{hostname}}"),
            about="Use of the GPU's memory, of the GPU where it is highest.",
            unit="percentunit",
            empty="AMD's exporter not scraped.",
            width=4,
            limits={0.95: "orange", 0.99: "red"},
        ),
        number(
            "Hottest",
            now(most(HOST, gpu("gpu_junction_temperature")), "{{hostname}}"),
            about="Hottest spot of any GPU.",
            unit="celsius",
            empty="AMD's exporter not scraped.",
            width=4,
            limits={90: "orange", 100: "red"},
        ),
        number(
            "Power",
            now(total(HOST, gpu("gpu_package_power")), "{{hostname}}"),
            about="Of all GPUs of a host.",
            unit="watt",
            empty="AMD's exporter not scraped.",
            width=4,
        ),
        number(
            "Uncorrectable errors",
            now(total(HOST, gpu("gpu_ecc_uncorrect_total")), "{{hostname}}"),
            about="Errors of memory that could not be corrected, since the driver was loaded.",
            unit="none",
            empty="AMD's exporter not scraped.",
            width=4,
            limits={1: "red"},
        ),
    ]


def _gpus() -> list[Builder]:
    return [
        bars(
            "Memory of each GPU",
            now(most(GPU, gpu("gpu_used_vram")), NAME),
            about="In use, as the exporter's MB, which are MiB. The GPUs of a deployment should be alike.",
            unit="mbytes",
            empty=SILENT,
            width=12,
            height=7,
        ),
        timeline(
            "Health of each GPU",
            over_time(least(GPU, gpu("gpu_health")), NAME),
            about="What the exporter makes of ECC errors and of the driver's fatal records.",
            empty=SILENT,
            width=12,
            height=7,
            words={0: ("unhealthy", "red"), 1: ("healthy", "green")},
        ),
        lines(
            "Power of each GPU",
            over_time(most(GPU, gpu("gpu_package_power")), NAME),
            about="Of the whole package. One that takes little while the others take much waits, or hangs.",
            unit="watt",
            empty=SILENT,
            width=10,
            height=7,
            many=True,
        ),
        lines(
            "Temperature",
            over_time(most(HOST, gpu("gpu_junction_temperature")), "{{hostname}} chip"),
            over_time(most(HOST, gpu("gpu_memory_temperature")), "{{hostname}} memory"),
            about="Hottest spot of any chip of a host, and of its memory.",
            unit="celsius",
            empty=SILENT,
            width=7,
            height=7,
        ),
        lines(
            "Activity",
            over_time(most(HOST, gpu("gpu_gfx_activity")), "{{hostname}} busiest"),
            over_time(least(HOST, gpu("gpu_gfx_activity")), "{{hostname}} idlest"),
            over_time(most(HOST, gpu("gpu_umc_activity")), "{{hostname}} memory, busiest"),
            about="Share of the time in which the compute engine of the busiest GPU of a host, and of the "
            "idlest, works; and the busiest memory controller. Where the two are far apart one GPU waits, or "
            "hangs: the one that takes little power.",
            unit="percent",
            empty=SILENT,
            width=7,
            height=7,
            whole=100,
        ),
    ]


def _errors() -> list[Builder]:
    return [
        lines(
            "Memory errors in an hour",
            *(
                over_time(
                    total("hostname, gpu_id", f"increase({gpu(f'gpu_ecc_{kind}_total')}[1h])"),
                    f"{{{{hostname}}}} {{{{gpu_id}}}} {word}",
                )
                for kind, word in ERRORS.items()
            ),
            about="New ones of the last hour. An uncorrectable error may have changed weights or an answer.",
            unit="none",
            empty=SILENT,
            width=12,
            height=6,
            many=True,
        ),
        lines(
            "Held back",
            *(
                over_time(
                    most(HOST, gpu(f"gpu_violation_{part}_residency_percentage")), f"{{{{hostname}}}} {word}"
                )
                for part, word in HELD_BACK.items()
            ),
            about="Share of the time in which power or heat held a GPU back, and where: of each host the GPU "
            "for which it is longest.",
            unit="percent",
            empty=f"{SILENT} Or the GPUs do not tell.",
            width=12,
            height=6,
            whole=100,
        ),
    ]


def _machine() -> list[Builder]:
    host = {
        "free": m.HOST_MEMORY_AVAILABLE,
        "all": m.HOST_MEMORY_CAPACITY,
        "shared": m.HOST_MEMORY_SHMEM,
    }
    group = {"used": m.CGROUP_USED, "limit": m.CGROUP_LIMIT, "shared": m.CGROUP_SHMEM}
    named = "{{release}} {{instance}}"
    return [
        lines(
            "Memory of the machine",
            *(over_time(most(ENGINE, ours(metric)), f"{named} {word}") for word, metric in host.items()),
            about="By the sidecar: all, what is to be had without swapping, and shared memory (tmpfs), in "
            "which ranks exchange data.",
            unit="bytes",
            empty=f"No sidecar is scraped. {NOT_THERE}",
            width=10,
            height=6,
        ),
        lines(
            "Memory of the control group",
            *(over_time(most(ENGINE, ours(metric)), f"{named} {word}") for word, metric in group.items()),
            about="Of the sidecar's own control group. Where it has a container of its own, as in Kubernetes "
            "and compose, that is not the engine's, whose memory nothing here counts.",
            unit="bytes",
            empty=NO_GROUP,
            width=10,
            height=6,
        ),
        number(
            "Killed for memory",
            now(total(RELEASE, f"increase({ours(m.CGROUP_OOM_KILLS)}[1h])"), "{{release}}"),
            about="Processes of the sidecar's own control group that the kernel killed in the last hour. The "
            "engine's are among them only where both are in one container; else the orchestrator tells "
            "(OOMKilled).",
            unit="none",
            empty="Nothing is counted here.",
            width=4,
            height=6,
            limits={0.5: "red"},
        ),
    ]
