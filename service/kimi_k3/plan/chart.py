# SPDX-License-Identifier: Apache-2.0
"""What the Helm chart knows of the profiles, ``files/profiles.json``: ``python -m kimi_k3.plan.chart FILE``.

Templates cannot ask a program. What a pod's specification needs (GPUs, seconds, whether consent is needed)
is written beside them, from the data that ``kimi-k3 serve`` reads; a test holds the two equal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kimi_k3.plan.budget import (
    PROBE_MARGIN_SECONDS,
    READY_TIMEOUT_MARGIN_SECONDS,
    TEARDOWN_SECONDS,
)
from kimi_k3.plan.chosen import known_flags
from kimi_k3.plan.compose import fitting_gpus
from kimi_k3.plan.overrides import settable
from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.profiles.schema import Profile
from kimi_k3.words.addresses import ENGINE_PORT, SIDECAR_PORT

_ABOUT = "made by `python -m kimi_k3.plan.chart helm/kimi-k3-gfx942/files/profiles.json`; edit the profiles"


def chart_facts() -> dict[str, Any]:
    """Ports, margins of the time budgets in seconds, and what each profile asks of a pod."""
    return {
        "about": _ABOUT,
        "ports": {"engine": ENGINE_PORT, "sidecar": SIDECAR_PORT},
        "margins": {
            "startupProbe": READY_TIMEOUT_MARGIN_SECONDS + PROBE_MARGIN_SECONDS,
            "progressDeadline": READY_TIMEOUT_MARGIN_SECONDS + 2 * PROBE_MARGIN_SECONDS,
            "teardown": TEARDOWN_SECONDS,
        },
        "settings": settable(known_flags()),
        "profiles": {name: _facts(load_profile(name)) for name in profile_names()},
    }


def chart_document() -> str:
    """The whole file."""
    return json.dumps(chart_facts(), indent=1) + "\n"


def _facts(profile: Profile) -> dict[str, Any]:
    gpus = fitting_gpus(profile)
    return {
        "notStartable": profile.not_startable,
        "nodes": profile.nodes,
        "gpusPerNode": 0 if profile.gpu is None else profile.gpu.per_node,
        "gpuNames": [gpu.title for gpu in gpus],
        "deviceIds": [device for gpu in gpus for device in gpu.device_ids],
        "weights": profile.weights.value,
        "trustRemoteCode": "--trust-remote-code" in profile.flags,
        "startTimeout": profile.start_timeout_seconds,
        "drainTimeout": profile.drain_timeout_seconds,
        "readinessDelay": profile.readiness_delay_seconds,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(chart_document())
