# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.replay [STATE_DIR]``: a recorded start happens again, to be looked at.

With ``--sidecar`` the sidecar is started beside it. Ctrl-C ends both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from kimi_k3.errors import OperatorError
from kimi_k3.words.addresses import SIDECAR_PORT
from kimi_k3.words.environment import PREFIX
from kimi_k3.words.phases import Phase
from tests.sidecar.engine import fake_engine

from .player import Then, play, require_ours
from .recording import Recording


def main() -> None:
    """Read the command line and replay until Ctrl-C."""
    recording = Recording.load()
    phases = [phase.value for phase in recording.phases()]
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=recording.about)
    parser.add_argument("state_dir", nargs="?", type=Path, help="default: one that is gone afterwards")
    parser.add_argument("--speed", type=float, default=1.0, help="seconds of the recording in a second")
    parser.add_argument("--from", dest="begin", choices=phases, help="begin in the middle of a phase")
    parser.add_argument("--until", choices=phases, help="hold in the middle of a phase")
    parser.add_argument("--then", type=Then, choices=list(Then), default=Then.KEEP, help="what follows")
    parser.add_argument("--sidecar", action="store_true", help="start the sidecar, too")
    parser.add_argument("--port", type=int, default=SIDECAR_PORT, help="the sidecar's port")
    given = parser.parse_args()
    if not given.speed > 0:
        parser.error("--speed must be above 0")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(recording.about)
    with contextlib.ExitStack() as stack:
        directory = given.state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        require_ours(directory, recording)
        engine = stack.enter_context(fake_engine())
        engine.mood = "dead"
        if given.sidecar:
            stack.enter_context(_sidecar(directory, given.port))
            print(f"http://127.0.0.1:{given.port}/ (status, metrics and more below it); Ctrl-C ends it")

        def entered(phase: Phase) -> None:
            print(f"{phase}: {phase.description}", flush=True)
            engine.mood = "ok" if Phase.WARMING.position <= phase.position <= Phase.READY.position else "dead"

        play(
            recording,
            directory,
            stop,
            begin=recording.middle_of(Phase(given.begin)) if given.begin else 0.0,
            end=recording.middle_of(Phase(given.until)) if given.until else None,
            speed=given.speed,
            then=given.then,
            engine_url=engine.url,
            entered=entered,
        )


@contextlib.contextmanager
def _sidecar(directory: Path, port: int) -> Iterator[None]:
    """The sidecar over ``directory``, in a session of its own: the replay ends it."""
    child = subprocess.Popen(
        [sys.executable, "-m", "kimi_k3", "sidecar", "--state-dir", str(directory), "--port", str(port)],
        env={name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)},
        start_new_session=True,
    )
    try:
        yield
    finally:
        child.terminate()
        child.wait()


if __name__ == "__main__":
    try:
        main()
    except OperatorError as error:
        sys.exit(f"replay: error: {error}")
