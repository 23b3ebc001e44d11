# SPDX-License-Identifier: Apache-2.0
"""What Prometheus scrapes at real scale, in every phase of the replayed start."""

from __future__ import annotations

import shutil
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kimi_k3.journal.models import SUPERVISOR_FILE
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.examples import MACHINE
from kimi_k3.sidecar.samples import Observation, samples
from kimi_k3.sidecar.settings import Settings
from kimi_k3.words.phases import Phase
from tests.sidecar.serving import serving, wait_until

from .player import play, shifted
from .recording import Recording, journal_at
from .test_replay import PASSED

PROMTOOL = shutil.which("promtool")
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def scrape(recording: Recording, directory: Path, phase: Phase) -> tuple[str, str]:
    """What a real sidecar answers in the middle of a phase: as plain text and as OpenMetrics."""
    stop = threading.Event()
    middle = recording.middle_of(phase)
    playing = threading.Thread(
        target=play, args=(recording, directory, stop), kwargs={"begin": middle, "end": middle}
    )
    playing.start()
    try:
        wait_until(lambda: (directory / SUPERVISOR_FILE).exists())
        with serving(create_app(Settings(state_dir=directory))) as url:
            plain = httpx.get(url + "/metrics", trust_env=False, timeout=30)
            open_metrics = httpx.get(
                url + "/metrics", trust_env=False, timeout=30, headers={"Accept": OPENMETRICS}
            )
    finally:
        stop.set()
        playing.join()
    return plain.text, open_metrics.text


@pytest.mark.parametrize("phase", PASSED)
def test_every_phase_is_scraped_cleanly(tmp_path: Path, phase: Phase) -> None:
    """Both formats are parsed, say the same, and promtool finds nothing to mend."""
    plain, open_metrics = scrape(Recording.load(), tmp_path, phase)
    families = {family.name: family for family in text_string_to_metric_families(plain)}
    parsed = {
        family.name: family
        for family in openmetrics.text_string_to_metric_families(open_metrics)  # type: ignore[no-untyped-call]
    }
    assert parsed["kimi_k3_phase"].type == "stateset"
    states = {sample.labels["kimi_k3_phase"]: sample.value for sample in families["kimi_k3_phase"].samples}
    assert {name for name, value in states.items() if value == 1} == {phase.value}
    assert not [name for name in families if name.startswith("vllm")]
    if PROMTOOL is None:
        pytest.skip("promtool is not installed; run scripts/programs (Debian: apt-get install prometheus)")
    found = subprocess.run([PROMTOOL, "check", "metrics"], input=plain, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_series_are_as_many_from_the_first_to_the_last() -> None:
    """Cardinality at 96 layers, 2 projections and 8 ranks: bounded, and nothing by rank and layer at once."""
    recording = Recording.load()
    clock = shifted(datetime(2026, 1, 1, tzinfo=UTC), 0.0, 1.0)
    counts = {}
    for phase in PASSED:
        seconds = recording.middle_of(phase)
        journal = journal_at(recording, seconds, clock)
        seen = Observation(journal=journal, health=None, machine=MACHINE, now=clock(seconds))
        found = [(one.metric.name, one.labels) for one in samples(seen)]
        assert len(found) == len(set(found))

        counts[phase] = len(found)
    assert counts[Phase.PREFLIGHT] > 96 * 2 * 4
    assert counts[Phase.READY] == max(counts.values()) < 1600
