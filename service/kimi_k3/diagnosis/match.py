# SPDX-License-Identifier: Apache-2.0
"""From the last lines of a log and an exit code to a cause and a remedy. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kimi_k3.diagnosis.catalogue import Failure, load_catalogue

MAX_QUOTED = 300
"""Characters of a log line that are quoted in a message."""

SIGNALS = {
    -4: ("illegal instruction", "use a build of vLLM for this machine's CPU"),
    -6: ("abort, mostly a compiler's or a driver's fatal error", "read the last lines of engine.log"),
    -7: ("bus error, mostly a full /dev/shm", "run the container with --ipc host or --shm-size 64g"),
    -9: (
        "killed from outside, nearly always by the kernel's out-of-memory killer",
        "look in dmesg for oom-kill, and raise the memory limit",
    ),
    -11: ("segmentation fault", "read the last lines of engine.log"),
    -15: ("ended by a SIGTERM that did not come from the supervisor", "find out who sent it"),
}
"""What an exit by a signal means; exit codes as :mod:`subprocess` gives them."""

# The last line of a traceback, after whatever a process prefixes its lines with: "ValueError: ...".
_EXCEPTION = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)): (\S.*)$")
_VALIDATION = re.compile(r"validation errors? for \w+$")
# Frames around another process's failure: they say that, not why (vllm/v1/engine/utils.py).
_WRAPPERS = re.compile(
    r"initialization failed|root cause|stack trace above|EngineDeadError|CancelledError|"
    r"after shutdown|KeyboardInterrupt|SystemExit"
)


@dataclass(frozen=True)
class Diagnosis:
    """Why the engine ended. ``name`` is the catalogue's row, or ``None`` for a guess."""

    name: str | None
    cause: str
    remedy: str


def diagnose(
    lines: Sequence[str], exit_code: int | None, *, failures: Iterable[Failure] | None = None
) -> Diagnosis | None:
    """The most specific explanation there is, or ``None`` when there is nothing to go by.

    Catalogue rows come first, in the catalogue's order; then a known signal; then the last exception
    that a traceback ended with, wrappers around another process's failure left out.

    Args:
        lines: the last lines of the engine's log, oldest first.
        exit_code: as :mod:`subprocess` gives it, ``None`` while the engine lives.
        failures: the catalogue's rows; the package's own if not given.
    """
    for failure in load_catalogue().failures if failures is None else failures:
        pattern = re.compile(failure.pattern)
        if any(pattern.search(line) for line in lines):
            return Diagnosis(failure.name, failure.cause, failure.remedy)
    if exit_code in SIGNALS:
        return Diagnosis(None, *SIGNALS[exit_code])
    for index in reversed(range(len(lines))):
        found = _EXCEPTION.search(lines[index])
        if found and not _WRAPPERS.search(lines[index]):
            # pydantic puts the reason on the next line.
            more = " ".join(lines[index + 1 : index + 2]) if _VALIDATION.search(found[2]) else ""
            text = _shortened(f"{found[1]}: {found[2]} {more}")
            return Diagnosis(None, text, "read engine.log above that line")
    return None


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."
