# SPDX-License-Identifier: Apache-2.0
"""`kimi-k3 demo`: the whole product on the miniature, from an empty directory to an answered question.

It runs the very commands an operator would, `kimi-k3 serve` and `kimi-k3 sidecar`, and sees of them
only what an operator sees: the sidecar's answers. The journal and both processes are gone when it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kimi_k3.checkpoint import MINIATURE
from kimi_k3.checkpoint.shipped import QUESTION
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.addresses import HOST
from kimi_k3.words.environment import PREFIX
from kimi_k3.words.phases import STARTING, Phase
from kimi_k3.words.python import python_module
from kimi_k3.words.weights import Weights

ANSWER_TOKENS = 160
POLL_SECONDS = 0.3
END_SECONDS = 60.0
SHOWN = tuple(phase for phase in STARTING if phase not in (Phase.PENDING, Phase.DOWNLOADING, Phase.CAPTURING))
"""Phases that a start on a CPU from a local directory passes through."""


def run_demo(*, weights: Weights, port: int, sidecar_port: int, once: bool) -> None:
    """Serve the miniature, ask one question, stay until interrupted.

    Args:
        weights: int4 shows a conversion; consent is given here, for a toy that is thrown away.
        port, sidecar_port: used if they are free, else any free port.
        once: end after the answer.

    Raises:
        OperatorError: the start failed; the supervisor has said why on standard error.
    """
    console = Console(soft_wrap=True)
    with _directory() as directory, _sigterm_interrupts():
        console.print("The miniature: 12 million parameters in Kimi-K3's format, trained to answer a little.")
        if weights.lossy:
            console.print(
                "Its MXFP4 experts will be converted to int4, which is lossy; the demo accepts that for this "
                "toy (--weights mxfp4 serves them exactly)."
            )
        port = _free(port)
        sidecar_port = _free(sidecar_port, taken=port)
        state_dir = directory / "state"
        with (
            (directory / "serve.log").open("wb") as log,
            _child(
                *("serve", MINIATURE, "--profile", "cpu-tiny", "--weights", weights.value),
                *("--accept-lossy", "--host", HOST, "--port", port, "--state-dir", state_dir),
                log=log,
            ) as supervisor,
            _child(
                *("sidecar", "--host", HOST, "--port", sidecar_port, "--state-dir", state_dir), log=log
            ) as sidecar,
        ):
            engine, status = f"http://{HOST}:{port}", f"http://{HOST}:{sidecar_port}"
            console.print(f"OpenAI API: {engine}/v1   status, probes, metrics: {status}/status")
            _follow(console, status, (supervisor, sidecar), directory / "serve.log")
            _ask(console, engine, weights)
            if not once:
                _stay(console, status, supervisor, directory / "serve.log")


def _follow(console: Console, status: str, children: tuple[subprocess.Popen[bytes], ...], log: Path) -> None:
    """Show a bar per phase until the sidecar says ready."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[what]}"),
        console=console,
        disable=not console.is_terminal,
    )
    bars = {
        phase: progress.add_task(phase.value, total=None, start=False, what=phase.description)
        for phase in SHOWN
    }
    current = Phase.PENDING
    with progress:
        while True:
            for child in children:
                if child.poll() is not None:
                    raise _failure(child, log)
            startup = _get(f"{status}/startupz")
            # The sidecar may be there before the supervisor has written anything.
            if startup is not None and startup["phase"] is not None:
                phase = Phase(startup["phase"])
                if phase is not current:
                    if not console.is_terminal:
                        console.print(f"{phase}: {phase.description}")
                    for shown, bar in bars.items():
                        if shown.position <= phase.position:
                            progress.start_task(bar)
                        if shown.position < phase.position:
                            progress.update(bar, total=1.0, completed=1.0)
                current = phase
                if phase in bars and startup["fraction"] is not None:
                    progress.update(bars[phase], total=1.0, completed=startup["fraction"])
                if phase is Phase.READY and _get(f"{status}/readyz") is not None:
                    return
            time.sleep(POLL_SECONDS)


def _ask(console: Console, engine: str, weights: Weights) -> None:
    """Ask one chat question and print what comes back."""
    began = time.monotonic()
    body = {
        "model": "kimi-k3",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    # A proxy of the environment is for other machines, and cannot reach this one.
    response = httpx.post(f"{engine}/v1/chat/completions", json=body, timeout=300, trust_env=False)
    response.raise_for_status()
    answer = response.json()
    seconds = time.monotonic() - began
    console.print()
    console.print("Question: ", QUESTION, style="bold", sep="")
    text = answer["choices"][0]["message"]["content"]
    console.print("Answer:   ", text, sep="", markup=False, highlight=False)
    console.print(
        f"({answer['usage']['completion_tokens']} tokens in {seconds:.1f} s from {weights} experts on a CPU; "
        "it also counts days and dates, sorts numbers and finds codes in notes)",
        style="dim",
    )
    console.print()


def _stay(console: Console, status: str, supervisor: subprocess.Popen[bytes], log: Path) -> None:
    """Serve until interrupted, which is the good end."""
    try:
        console.print("Serving until Ctrl-C. Try:", style="bold")
        for path in ("readyz", "status", "conversion", "memory", "warnings", "metrics"):
            console.print(f"  curl {status}/{path}")
        supervisor.wait()
    except KeyboardInterrupt:
        console.print("Ending: vLLM finishes its requests first (Ctrl-C again ends it at once) ...")
    else:
        raise _failure(supervisor, log)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """A directory for everything; when the start fails, the logs that its error names are kept."""
    directory = Path(tempfile.mkdtemp(prefix="kimi-k3-demo-"))
    try:
        yield directory
    except OperatorError:
        raise
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _child(*arguments: object, log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A `kimi-k3` command in a session of its own, so that Ctrl-C reaches only the demo, which ends it.

    What the operator's shell has set for a real deployment, such as its API key, is not for the toy.
    """
    child = subprocess.Popen(
        python_module("kimi_k3", *map(str, arguments)),
        env={name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        child.terminate()
        # A second Ctrl-C must not leave vLLM behind: the supervisor's second SIGTERM is "at once".
        try:
            child.wait(END_SECONDS)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            child.terminate()
            child.wait()


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does: with its children and its files gone."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(child: subprocess.Popen[bytes], log: Path) -> OperatorError:
    """The error with which a child ended: its own last line says it best."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("kimi-k3: error: ")]
    if errors:
        what, _, remedy = errors[-1].removeprefix("kimi-k3: error: ").rpartition("; ")
        return OperatorError(what, remedy=remedy, exit_code=ExitCode(child.returncode))
    return OperatorError(
        f"a process of the demo ended with exit code {child.returncode}: {(lines or ['no output'])[-1]}",
        remedy="run `kimi-k3 checkpoint make` and `kimi-k3 serve` by hand to see its log",
    )


def _get(url: str) -> Any:
    """JSON of a 200 or, from a probe that is not yet satisfied, a 503; ``None`` if nobody answers."""
    try:
        response = httpx.get(url, timeout=5, trust_env=False)
    except httpx.TransportError:
        return None
    if response.status_code == httpx.codes.OK or url.endswith("/startupz"):
        return response.json()
    return None


def _free(port: int, *, taken: int | None = None) -> int:
    """``port`` if nobody has it and it is not ``taken`` by the demo itself, else one that is free."""
    # Twice any: the first may be the taken one, which nobody listens on yet.
    for candidate in (port, 0, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, candidate))
            chosen: int = probe.getsockname()[1]
            if chosen != taken:
                return chosen
    raise OperatorError(f"no free port on {HOST}", remedy="end some of the programs that listen there")
