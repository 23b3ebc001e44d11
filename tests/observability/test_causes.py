# SPDX-License-Identifier: Apache-2.0
"""Every alert is caused for real: a real Prometheus, real sidecars and supervisors, and what goes wrong.

Each cause is a release of its own, with the rules that the chart renders for it, in which time goes
:data:`FACTOR` times faster: five minutes are five seconds. All happen at once, so that each release shows
that it fires nothing for what happens to the others. vLLM's own causes are in ``test_engine_causes.py``.

What stands in for what: the engine is ``tests/supervisor/fake_engine.py``; GPUs that are full, and a start of
96 layers on 8 ranks, are the replayed recording (made, not measured); AMD's exporter is an exposition written
from its source (version 1.5.1: names, types and labels), over HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import yaml

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.journal.models import rank_file
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from kimi_k3.words.phases import Phase
from tests.observability.alerting import FILE, GPU_FILE, alerts, of_release, pod_of, scaled
from tests.observability.prometheus import NAMESPACE, PROGRAM, Exporter, Prometheus, Target, prometheus
from tests.observability.test_engine_causes import ENGINE_CAUSES
from tests.ports import free_port
from tests.replay.player import play
from tests.replay.recording import Recording, Write
from tests.sidecar.engine import fake_engine
from tests.sidecar.serving import serving, wait_until
from tests.supervisor.conftest import DRIVE, processes_in
from tests.supervisor.test_nodes import TOKEN, Nodes
from tests.surroundings import SURROUNDINGS

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no prometheus on this machine; run scripts/programs")

FACTOR = 60
PATIENCE = 150.0
INT4 = ("--weights", "int4", "--accept-lossy")
GIB = 2**30

CAUSES: dict[str, tuple[str, dict[str, str]]] = {
    "KimiK3SidecarAbsent": ("gone", {}),
    "KimiK3NoStart": ("elsewhere", {}),
    "KimiK3StartOverBudget": ("slow", {}),
    "KimiK3StartFailed": ("failed", {}),
    "KimiK3LoadingStalled": ("unread", {"rank": "0"}),
    "KimiK3ConversionStalled": ("unconverted", {"rank": "0"}),
    "KimiK3CanaryFailing": ("unanswered", {}),
    "KimiK3RestartLoop": ("loop", {}),
    "KimiK3NotReady": ("failed", {}),
    "KimiK3LossyUnacknowledged": ("lossy", {}),
    "KimiK3LossAboveLimit": ("lossy", {}),
    "KimiK3Stalled": ("stalled", {}),
    "KimiK3EngineAbsent": ("unscraped", {}),
    "KimiK3ReadyWithoutEngine": ("unreachable", {}),
    "KimiK3EngineWithoutReadiness": ("elsewhere", {}),
    "KimiK3VramNearLimit": ("packed", {"rank": "3"}),
    "KimiK3NodeMissing": ("alone", {}),
    "KimiK3NodeSilent": ("silent", {}),
    "KimiK3JournalFault": ("lossy", {}),
    "KimiK3GpuMetricsAbsent": ("unmeasured", {}),
    "KimiK3GpuUnhealthy": ("broken", {"gpu_id": "5"}),
    "KimiK3GpuEccUncorrectable": ("broken", {"gpu_id": "6"}),
}
"""Alert, the release that something happens to, and what the alert says beside that."""

ALSO = {
    # It fails, too, four times.
    ("loop", "KimiK3StartFailed"),
    # What does not get on will not be ready in time.
    ("unread", "KimiK3StartOverBudget"),
    ("unconverted", "KimiK3StartOverBudget"),
    # Nobody acknowledges what two nodes serve.
    ("silent", "KimiK3LossyUnacknowledged"),
}
"""What else the causes bring about."""

HEALTHY = ("healthy", "large")
"""Releases that go through a whole start and serve, and to which nothing happens."""


@dataclass
class Stage:
    """Everything that runs, and where its state is."""

    directory: Path
    checkpoint: Path
    stack: contextlib.ExitStack
    targets: list[Target | Exporter] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    sidecars: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    ecc_errors: int = 2

    def state_dir(self, release: str) -> Path:
        """The release's."""
        return self.directory / release

    def sidecar(self, release: str, *, of: str | None = None) -> contextlib.ExitStack:
        """A real sidecar over the state of a release, or of another one; closing what is returned ends it."""
        directory = self.state_dir(of or release)
        directory.mkdir(exist_ok=True)
        own = contextlib.ExitStack()
        url = own.enter_context(serving(create_app(Settings(state_dir=directory))))
        self.stack.push(own)
        self.sidecars[release] = url
        self.targets.append(Target(release, url, "-sidecar"))
        return own

    def engine_target(self, release: str, port: int | None = None) -> None:
        """Prometheus knows the release's engine, whether or not it answers."""
        self.ports.setdefault(release, free_port() if port is None else port)
        self.targets.append(Target(release, f"http://127.0.0.1:{self.ports[release]}"))

    def serve(self, release: str, behaviours: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A real supervisor with the fake engine."""
        command = [sys.executable, str(DRIVE), behaviours, "serve", str(self.checkpoint)]
        command += ["--profile", "cpu-tiny", "--port", str(self.ports[release])]
        command += ["--state-dir", str(self.state_dir(release)), *arguments]
        with (self.directory / f"{release}.log").open("ab") as log:
            process = subprocess.Popen(command, env=SURROUNDINGS, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def ready(self, release: str) -> bool:
        """Whether its sidecar says that traffic may come."""
        return httpx.get(self.sidecars[release] + "/readyz", trust_env=False).status_code == 200

    def acknowledge(self, release: str) -> None:
        """Somebody says that they know what the conversion cost."""
        url = self.sidecars[release] + "/warnings/lossy-weights/acknowledgement"
        httpx.post(url, json={"by": "Ada"}, trust_env=False).raise_for_status()

    def replay(self, release: str, recording: Recording, *, begin: float, speed: float) -> None:
        """The recorded start at real scale happens again."""
        engine = self.stack.enter_context(fake_engine())
        engine.mood = "dead" if begin == 0.0 else "ok"

        def entered(phase: Phase) -> None:
            engine.mood = "ok" if phase.position >= Phase.WARMING.position else "dead"

        self.sidecar(release)
        self.engine_target(release, int(engine.url.rpartition(":")[2]))
        thread = threading.Thread(
            target=play,
            args=(recording, self.state_dir(release), self.stop),
            kwargs={"begin": begin, "speed": speed, "engine_url": engine.url, "entered": entered},
        )
        thread.start()
        self.stack.callback(thread.join)
        self.stack.callback(self.stop.set)

    def exporter(self) -> None:
        """AMD's exporter, as its source says; GPU 5 of a release is unhealthy, and 6 has memory errors."""
        stage = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exposition(stage.ecc_errors).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = self.stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.stack.callback(thread.join)
        self.stack.callback(server.shutdown)
        self.targets.append(Exporter(f"http://127.0.0.1:{server.server_port}"))

    def close(self) -> None:
        """End whoever is left."""
        for process in self.processes:
            process.kill()
            process.wait()
        for directory in self.directory.iterdir():
            for pid in processes_in(directory):
                os.kill(pid, signal.SIGKILL)


def exposition(ecc_errors: int) -> str:
    """What AMD's exporter tells of a node with eight GPUs, of two releases' pods."""
    lines = []
    for name, about in (
        ("gpu_health", "Health of the GPU (0 = Unhealthy | 1 = Healthy)"),
        ("gpu_ecc_uncorrect_total", "Total Uncorrectable error count"),
    ):
        lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge"]
        for gpu in range(8):
            release = "broken" if gpu >= 4 else "healthy"
            labels = {
                "card_model": "102-D74500-00",
                "container": "engine",
                "deployment_mode": "baremetal",
                "gpu_compute_partition_type": "spx",
                "gpu_id": str(gpu),
                "gpu_memory_partition_type": "nps1",
                "gpu_partition_id": "0",
                "hostname": "node-a",
                "job_id": "",
                "job_partition": "",
                "job_user": "",
                "namespace": NAMESPACE,
                "pod": pod_of(release),
                "serial_number": f"69224700000{gpu}",
            }
            values = {"gpu_health": int(gpu != 5), "gpu_ecc_uncorrect_total": ecc_errors if gpu == 6 else 2}
            written = ",".join(f"{label}={json.dumps(value)}" for label, value in labels.items())
            lines.append(f"{name}{{{written}}} {values[name]}")
    return "\n".join(lines) + "\n"


def almost_full(recording: Recording) -> Recording:
    """The recording, in which the GPU of rank 3 has 1.5 of 256 GiB left in the end."""
    reading = {"kind": "device", "used_bytes": int(254.5 * GIB), "peak_bytes": None, "total_bytes": 256 * GIB}
    full = Write(recording.seconds, rank_file(3), {"memory": reading}, {})
    return dataclasses.replace(recording, writes=(*recording.writes, full))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, while all of it happens."""
    directory = tmp_path_factory.mktemp("causes")
    checkpoint = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny_checkpoint(checkpoint)
    with contextlib.ExitStack() as stack:
        stage = Stage(directory, checkpoint, stack)
        stack.callback(stage.close)
        nodes = {name: Nodes(checkpoint, directory / name) for name in ("alone", "silent")}
        leave = set_up(stage, nodes)
        stack.callback(lambda: end_nodes(nodes))
        (directory / "prometheus").mkdir()
        running = stack.enter_context(prometheus(directory / "prometheus", stage.targets))
        wait_until(lambda: len(running.values("up")) == len(stage.targets), seconds=60)
        running.judge(rules())
        bring_about(stage, running, nodes, leave)
        yield running


def rules() -> dict[str, list[dict[str, object]]]:
    """For each release what the chart makes of the rules, faster; of GPUs where an exporter is asked."""
    releases = {release for release, _ in CAUSES.values()} | set(HEALTHY)
    measured = {"unmeasured", "broken"}
    made = {}
    for release in sorted(releases):
        files = [GPU_FILE] if release in measured else [FILE]
        files += [GPU_FILE] if release == "healthy" else []
        texts = [of_release(path.read_text(), NAMESPACE, release) for path in files]
        made[release] = scaled([group for text in texts for group in yaml.safe_load(text)["groups"]], FACTOR)
    return made


def set_up(stage: Stage, nodes: dict[str, Nodes]) -> contextlib.ExitStack:
    """Who is scraped. Returns the sidecar that will be gone."""
    for release in (
        "healthy",
        "slow",
        "failed",
        "unread",
        "unconverted",
        "unanswered",
        "loop",
        "lossy",
        "stalled",
    ):
        stage.sidecar(release)
        stage.engine_target(release)
    engine = stage.ports["healthy"]
    leave = stage.sidecar("gone", of="healthy")
    stage.sidecar("unscraped", of="healthy")
    stage.sidecar("unreachable", of="healthy")
    stage.sidecar("elsewhere")
    for release in ("gone", "elsewhere"):
        stage.engine_target(release, engine)
    stage.engine_target("unreachable")
    for release, group in nodes.items():
        group.directory.mkdir()
        for node, port in group.sidecars.items():
            if node == 0 or release == "silent":
                group.sidecar(node)
                part = "-sidecar" if node == 0 else "-worker"
                stage.targets.append(Target(release, f"http://127.0.0.1:{port}", part, TOKEN))
        stage.engine_target(release)
    recording = Recording.load()
    stage.replay("large", recording, begin=0.0, speed=40.0)
    full = almost_full(recording)
    stage.replay("packed", full, begin=full.seconds - 1.0, speed=1.0)
    stage.exporter()
    return leave


def see_start(running: Prometheus, starts: set[str]) -> int:
    """How many starts of the release that loops Prometheus has seen so far."""
    found = running.values('kimi_k3_start_timestamp_seconds{release="loop"}')
    starts.update(one["value"][1] for one in found)
    return len(starts)


def bring_about(
    stage: Stage, running: Prometheus, nodes: dict[str, Nodes], leave: contextlib.ExitStack
) -> None:
    """What goes wrong, and what does not."""
    stage.serve("healthy", "good,tells-metrics", *INT4)
    wait_until(lambda: stage.ready("healthy"), seconds=PATIENCE)
    stage.acknowledge("healthy")
    wait_until(lambda: stage.ready("packed"), seconds=PATIENCE)
    stage.acknowledge("packed")
    leave.close()
    stage.ecc_errors = 3
    first = nodes["silent"].serve(0, "good,tells-metrics", port=stage.ports["silent"])
    second = nodes["silent"].serve(1)
    stage.serve("slow", "loads-slowly", "--start-timeout", "90")
    stage.serve("failed", "dies-loading", "--start-timeout", "5")
    stage.serve("unread", "stops-loading")
    first.wait_for(Phase.READY)
    second.wait_for(Phase.READY)
    stage.serve("unconverted", "stops-converting", *INT4)
    stage.serve("unanswered", "hangs-first,tells-metrics")
    stage.serve("stalled", "good,tells-metrics,hangs-serving")
    second.process.send_signal(signal.SIGSTOP)
    stage.serve("lossy", "good,tells-metrics,loses-much", *INT4)
    nodes["alone"].serve(0, port=stage.ports["alone"])
    starts: set[str] = set()
    for number in range(1, 5):
        assert stage.serve("loop", "dies-loading").wait(PATIENCE) != 0
        # One that lasts a second may fall between two scrapes; what it left does not.
        wait_until(lambda wanted=number: see_start(running, starts) == wanted, seconds=60)  # type: ignore[misc]
    wait_until(lambda: stage.ready("lossy"), seconds=PATIENCE)
    (stage.state_dir("lossy") / rank_file(7)).write_text("no record")
    wait_until(lambda: stage.ready("large"), seconds=PATIENCE)
    stage.acknowledge("large")


def end_nodes(nodes: dict[str, Nodes]) -> None:
    """Whoever was started for them."""
    for group in nodes.values():
        for process in group.started:
            process.kill()
            process.communicate()
        for node in group.sidecars:
            for pid in processes_in(group.state_dir(node)):
                os.kill(pid, signal.SIGKILL)


def test_every_alert_has_a_cause() -> None:
    """An alert that nobody has seen to fire for its cause may never do so."""
    assert set(CAUSES) | set(ENGINE_CAUSES) == set(alerts(FILE, GPU_FILE))


@pytest.mark.parametrize("alert", CAUSES)
def test_it_fires_for_its_cause(judged: Prometheus, alert: str) -> None:
    """For the release to which it happens, with what the alert is about in its labels, and readable."""
    release, labels = CAUSES[alert]
    own = {"release": release} if alert not in alerts(GPU_FILE) else {"namespace": NAMESPACE}
    wait_until(lambda: bool(judged.of(alert, **own, **labels)), seconds=PATIENCE)
    for fired in judged.of(alert, **own, **labels):
        assert fired.labels["namespace"] == NAMESPACE
        assert "pod" not in fired.labels or fired.labels["pod"].startswith(f"{release}-")
        text = fired.annotations["description"]
        assert NAMESPACE in text or fired.labels.get("pod", "?") in text
        assert "<no value>" not in text
        assert "error" not in text.lower().replace("squared error", "").replace("uncorrectable errors", "")


def test_nothing_else_fires(judged: Prometheus) -> None:
    """Whole starts of one rank and of eight stay silent; so does each release but for its cause."""
    expected = {(release, alert) for alert, (release, _) in CAUSES.items()} | ALSO
    found = {(whose(fired.labels), fired.labels["alertname"]) for fired in judged.fired.values()}
    assert found - expected == set()
    assert not [one for one in found if one[0] in HEALTHY]
    for release in HEALTHY:
        query = f'kimi_k3_ready{{release="{release}"}} == 1'
        assert judged.values(query), f"{release} does not serve"


def whose(labels: dict[str, str]) -> str:
    """The release that an alert is about; one of GPUs tells it by the pod, or not at all."""
    if labels["alertname"] == "KimiK3GpuMetricsAbsent":
        return "unmeasured"
    return labels.get("release") or labels["pod"].partition("-")[0]
