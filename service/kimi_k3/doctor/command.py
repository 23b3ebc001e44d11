# SPDX-License-Identifier: Apache-2.0
"""The command: read what was named, print what it means."""

from __future__ import annotations

from pathlib import Path

from kimi_k3.diagnosis.match import explain
from kimi_k3.diagnosis.scan import Evidence
from kimi_k3.doctor.report import as_lines, make_report
from kimi_k3.doctor.sources import read_log, read_state
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.writer import now
from kimi_k3.words.environment import default_state_dir


def run_doctor(
    *, log: Path | str | None, exit_code: int | None, state_dir: Path | None, as_json: bool
) -> ExitCode:
    """Look, print, and return 0 if a cause was found or nothing failed, 1 if that is unknown.

    Args:
        log: a path, or ``-``.
        exit_code: of the engine.
        state_dir: of the start; the default one when neither of the others is given.
        as_json: print the report as JSON.

    Raises:
        OperatorError: something that was named cannot be read.
    """
    if exit_code is not None and not -64 <= exit_code <= 255:
        raise OperatorError(
            f"--exit-code {exit_code}: is not an exit code",
            remedy="give 0 to 255, or the negative number of a signal",
            exit_code=ExitCode.USAGE,
        )
    if log is None and exit_code is None and state_dir is None:
        state_dir = default_state_dir().expanduser().absolute()
    state = None if state_dir is None else read_state(state_dir)
    path = log if log is not None or state is None else state.log
    read = None if path is None else read_log(path, "--state" if log is None else "--log")
    report = make_report(
        explain(Evidence(silent=False) if read is None else read.evidence, exit_code),
        log=read,
        exit_code=exit_code,
        state=state,
        own_log=log is None,
        now=now(),
    )
    print(report.model_dump_json(indent=1) if as_json else "\n".join(as_lines(report)))
    return report.outcome.exit_code
