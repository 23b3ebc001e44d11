# SPDX-License-Identifier: Apache-2.0
"""*Node*: the GPUs as AMD's device-metrics-exporter sees them, and the machine's memory as our sidecar does."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import OLD, bars, board, choice, lines, number, query, timeline, written
from dashboards.series import RELEASE, gpu, ours
from kimi_k3.sidecar import metrics as m

SILENT = "AMD's device-metrics-exporter is not scraped, or has another prefix (above)."
GPU = "hostname, gpu_id, gpu_partition_id"
NAME = "{{hostname}} {{gpu_id}}.{{gpu_partition_id}}"
THROTTLES = {
    "processor_hot": "processor hot",
    "ppt": "power limit",
    "socket_thermal": "socket",
    "vr_thermal": "voltage regulators",
    "hbm_thermal": "memory",
}
"""Part of the name of ``gpu_violation_*_residency_percentage``, and what it is about."""


def dashboard() -> Dashboard:
    """The dashboard of the machines."""
    return board(
        "node",
        "node",
        "GPUs by AMD's device-metrics-exporter, which the chart does not install; the machine's memory by the sidecar.",
        [
            choice("namespace", "Namespace", m.BUILD.name),
            choice("release", "Release", m.BUILD.name),
            written(
                "prefix",
                "Exporter's prefix",
                "MetricsFieldPrefix of its configuration, as amd_; empty unless that is set.",
            ),
            choice("hostname", "Host", "${prefix}gpu_health"),
        ],
        [
            number(
                "GPUs",
                query(f"sum by (hostname) ({gpu('gpu_nodes_total')})", "{{hostname}}", now=True),
                about="GPUs of each host.",
                unit="none",
                empty=SILENT,
                width=4,
            ),
            number(
                "Not healthy",
                query(f"sum by (hostname) ({gpu('gpu_health')} == bool 0)", "{{hostname}}", now=True),
                about="GPUs that the exporter counts as unhealthy: errors beyond its thresholds, or fatal records.",
                unit="none",
                empty=SILENT,
                width=4,
                limits={1: "red"},
            ),
            number(
                "Fullest memory",
                query(
                    f"max by (hostname) ({gpu('gpu_used_vram')} / {gpu('gpu_total_vram')})", "{{hostname}}", now=True
                ),
                about="Use of the GPU's memory, of the GPU where it is highest.",
                unit="percentunit",
                empty=SILENT,
                width=4,
                limits={0.95: "orange", 0.99: "red"},
            ),
            number(
                "Hottest",
                query(f"max by (hostname) ({gpu('gpu_junction_temperature')})", "{{hostname}}", now=True),
                about="Hottest spot of any GPU.",
                unit="celsius",
                empty=SILENT,
                width=4,
                limits={90: "orange", 100: "red"},
            ),
            number(
                "Power",
                query(f"sum by (hostname) ({gpu('gpu_package_power')})", "{{hostname}}", now=True),
                about="Of all GPUs of a host.",
                unit="watt",
                empty=SILENT,
                width=4,
            ),
            number(
                "Uncorrectable errors",
                query(f"sum by (hostname) ({gpu('gpu_ecc_uncorrect_total')})", "{{hostname}}", now=True),
                about="Errors of memory that could not be corrected, since the driver was loaded.",
                unit="none",
                empty=SILENT,
                width=4,
                limits={1: "red"},
            ),
            bars(
                "Memory of each GPU",
                query(f"max by ({GPU}) ({gpu('gpu_used_vram')})", NAME, now=True),
                about="In use, as the exporter's MB, which are MiB. The GPUs of a deployment should be alike.",
                unit="mbytes",
                empty=SILENT,
                width=12,
                height=7,
            ),
            timeline(
                "Health of each GPU",
                query(f"min by ({GPU}) ({gpu('gpu_health')})", NAME),
                about="What the exporter makes of ECC errors and of the driver's fatal records.",
                empty=SILENT,
                width=12,
                height=7,
                words={0: ("unhealthy", "red"), 1: ("healthy", "green")},
            ),
            lines(
                "Power of each GPU",
                query(f"max by ({GPU}) ({gpu('gpu_package_power')})", NAME),
                about="Of the whole package.",
                unit="watt",
                empty=SILENT,
                width=8,
                height=6,
            ),
            lines(
                "Temperature",
                query(f"max by ({GPU}) ({gpu('gpu_junction_temperature')})", f"{NAME} hottest spot"),
                query(f"max by ({GPU}) ({gpu('gpu_memory_temperature')})", f"{NAME} memory"),
                about="Hottest spot of the chip, and its memory.",
                unit="celsius",
                empty=SILENT,
                width=8,
                height=6,
            ),
            lines(
                "Activity",
                query(f"max by ({GPU}) ({gpu('gpu_gfx_activity')})", f"{NAME} compute"),
                query(f"max by ({GPU}) ({gpu('gpu_umc_activity')})", f"{NAME} memory"),
                about="Share of the time in which the compute engine, or the memory's controller, is busy. One rank that "
                "is idle while the others are busy waits, or hangs.",
                unit="percent",
                empty=SILENT,
                width=8,
                height=6,
                whole=100,
            ),
            lines(
                "Memory errors in an hour",
                query(f"sum by (hostname, gpu_id) (increase({gpu('gpu_ecc_uncorrect_total')}[1h]))", "{{hostname}} {{gpu_id}} uncorrectable"),
                query(f"sum by (hostname, gpu_id) (increase({gpu('gpu_ecc_deferred_total')}[1h]))", "{{hostname}} {{gpu_id}} deferred"),
                query(f"sum by (hostname, gpu_id) (increase({gpu('gpu_ecc_correct_total')}[1h]))", "{{hostname}} {{gpu_id}} corrected"),
                about="New ones of the last hour. An uncorrectable error may have changed weights or an answer.",
                unit="none",
                empty=SILENT,
                width=12,
                height=6,
            ),
            lines(
                "Slowed down",
                *(
                    query(f"max by ({GPU}) ({gpu(f'gpu_violation_{part}_residency_percentage')})", f"{NAME} {word}")
                    for part, word in THROTTLES.items()
                ),
                about="Share of the time in which a GPU was held back by power or heat.",
                unit="percent",
                empty=f"{SILENT} Or the GPU does not tell.",
                width=12,
                height=6,
                whole=100,
            ),
            lines(
                "Memory of the machine",
                query(f"max by ({RELEASE}, instance) ({ours(m.HOST_MEMORY_AVAILABLE)})", "{{release}} {{instance}} free"),
                query(f"max by ({RELEASE}, instance) ({ours(m.HOST_MEMORY_CAPACITY)})", "{{release}} {{instance}} all"),
                query(f"max by ({RELEASE}, instance) ({ours(m.HOST_MEMORY_SHMEM)})", "{{release}} {{instance}} shared"),
                about="By the sidecar: all, what is to be had without swapping, and shared memory (tmpfs, which holds what "
                "ranks exchange).",
                unit="bytes",
                empty=f"No sidecar answers. {OLD}",
                width=10,
                height=6,
            ),
            lines(
                "Memory of the control group",
                query(f"max by ({RELEASE}, instance) ({ours(m.CGROUP_USED)})", "{{release}} {{instance}} used"),
                query(f"max by ({RELEASE}, instance) ({ours(m.CGROUP_LIMIT)})", "{{release}} {{instance}} limit"),
                about="Of the sidecar's own control group: in a container, its container's.",
                unit="bytes",
                empty="The sidecar is in no control group whose memory is counted.",
                width=10,
                height=6,
            ),
            number(
                "Killed for memory",
                query(f"sum by ({RELEASE}) (increase({ours(m.CGROUP_OOM_KILLS)}[1h]))", "{{release}}", now=True),
                about="Processes of the sidecar's control group that the kernel killed in the last hour.",
                unit="none",
                empty="The sidecar is in no control group whose memory is counted.",
                width=4,
                limits={0.5: "red"},
            ),
        ],
    )
