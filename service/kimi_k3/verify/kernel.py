# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 verify kernel``: the int4 kernel of this machine against float32, at the size of the real model.

Every start makes the same comparison with its own layers before it loads. This one is for a machine without a
start, and for the record: its shape and batches are those of the kernel's authors (vllm-project/vllm#51274).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from kimi_k3.backends import environment_apart
from kimi_k3.errors import OperatorError
from kimi_k3.preflight.hardware import hardware
from kimi_k3.preflight.machine import Machine
from kimi_k3.profiles.schema import Profile
from kimi_k3.supervisor.child import die_with_parent
from kimi_k3.verify.asking import shown, subject_of
from kimi_k3.verify.keeping import Broken, kept
from kimi_k3.verify.results import Curve, Figure, Kind, Row, State, Subject
from kimi_k3.verify.target import Target
from kimi_k3.words.backends import Request
from kimi_k3.words.proving import MARK, PRODUCTION, REDUCED, Measured, Proven
from kimi_k3.words.python import python_module

MODULE = "kimi_k3.engine.proving"
WITHOUT_NEGATIVE = (
    "a start converts without negative scales then, which costs mse a little more and amax nothing"
)


def run_kernel(
    target: Target, out: Path, *, profile: Profile, reduced: bool | None, report: Callable[[str], None]
) -> State:
    """Ask the kernel, keep its errors, and say whether they are rounding.

    Args:
        target: a running deployment is not needed; one that answers is told in the report.
        profile: whose environment the kernels get.
        reduced: whether the layer is small; ``None`` for what suits the profile's device.

    Raises:
        OperatorError: the kernel cannot be asked.
    """
    on_gpus = profile.gpu is not None
    small = not on_gpus if reduced is None else reduced
    request = REDUCED if small else PRODUCTION
    settings = {"profile": profile.name, **request.model_dump(exclude={"int4"})}
    with kept(out, Kind.KERNEL, _subject(target, on_gpus=on_gpus), settings) as sheet:
        proven: Proven | None = None
        measured: list[Measured] = []
        for answer in _ask(request, {name: one.value for name, one in profile.environment.items()}):
            if isinstance(answer, Proven):
                proven = answer
                report(f"{answer.backend} of vLLM {answer.vllm} on {answer.platform}")
                continue
            assert proven is not None, "it is told first"
            measured.append(answer)
            report(f"{answer.tokens} tokens, {_signs(answer)}: {_error(answer)}")
            sheet.note(figures=_figures(measured), curves=_curves(measured))
        if proven is None or len(measured) < 2 * len(proven.batches):
            raise Broken(f"the kernel's process ended after {len(measured)} batches without an error")
        rows = list(_rows(proven, measured))
        sheet.note(rows=[*rows, _production(proven, small, measured, rows)])
        for row in sheet.result.rows:
            report(row.line)
    return sheet.result.state


def _subject(target: Target, *, on_gpus: bool) -> Subject:
    """The deployment if there is one, else this machine."""
    try:
        return subject_of(target)
    except OperatorError:
        return Subject(engine="no running engine", hardware=hardware(Machine(), on_gpus=on_gpus))


def _ask(request: Request, variables: dict[str, str]) -> Iterator[Proven | Measured]:
    """What the process tells, as it comes.

    Raises:
        Broken: it ended with an error.
    """
    last = "silence"
    with subprocess.Popen(
        python_module(MODULE, request.model_dump_json()),
        env=environment_apart(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent(os.getpid()),
    ) as process:
        assert process.stdout is not None
        try:
            first = True
            for line in process.stdout:
                if line.startswith(MARK):
                    text = line.removeprefix(MARK)
                    yield Proven.model_validate_json(text) if first else Measured.model_validate_json(text)
                    first = False
                elif line.strip():
                    last = line
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise Broken(f"the kernel's process ended with exit code {process.returncode}: {shown(last)}")


def _rows(proven: Proven, measured: list[Measured]) -> Iterator[Row]:
    """Pass if a start would serve with this kernel: the worst token of every batch is within rounding.

    Negative scales alone make no failure. A start whose kernel gets only those wrong converts without them
    (``engine.choice.prove_backend``), and the rule ``amax`` has none; the row says so.
    """
    serves = True
    for signed in (False, True):
        mine = [one for one in measured if one.signed is signed]
        worst = max(mine, key=lambda one: float("inf") if one.error is None else one.error)
        right = _is_right(proven, worst)
        tokens = ", ".join(str(one.tokens) for one in mine)
        evidence = f"{tokens} tokens: largest {_error(worst)}; rounding is at most {proven.tolerance}"
        serves = right or (signed and serves)
        yield Row(
            name=f"{proven.backend} against float32, {_signs(mine[0])}",
            state=State.PASS if serves else State.FAIL,
            evidence=evidence if right or not serves else f"wrong, {evidence}; {WITHOUT_NEGATIVE}",
        )


def _is_right(proven: Proven, one: Measured) -> bool:
    return one.error is not None and one.error <= proven.tolerance


def _production(proven: Proven, small: bool, measured: list[Measured], rows: list[Row]) -> Row:
    """What the others say, if shape and GPU were those of the real thing."""
    name = "production shape on gfx942"
    where = proven.architecture or proven.platform
    if small or not (proven.architecture or "").startswith("gfx942"):
        size = "a reduced layer" if small else "the real layer"
        return Row(name=name, state=State.NOT_RUN, evidence=f"this was {size} on {where}")
    state = State.FAIL if any(row.state is State.FAIL for row in rows) else State.PASS
    evidence = f"112 of 896 experts, 15 a token, on {where}"
    if state is State.PASS and not all(_is_right(proven, one) for one in measured):
        evidence = f"{evidence}; negative scales are wrong: {WITHOUT_NEGATIVE}"
    return Row(name=name, state=state, evidence=evidence)


def _figures(measured: list[Measured]) -> list[Figure]:
    return [
        Figure(name=f"relative error, {one.tokens} tokens, {_signs(one)}", value=one.error)
        for one in measured
        if one.error is not None
    ]


def _curves(measured: list[Measured]) -> list[Curve]:
    found = []
    for signed in (False, True):
        mine = [(one.tokens, one.error) for one in measured if one.signed is signed and one.error is not None]
        if mine:
            found.append(
                Curve(
                    plot="relative error of the worst token",
                    name="scales of both signs" if signed else "positive scales",
                    x_label="tokens of the batch",
                    y_label="relative error",
                    x=tuple(float(tokens) for tokens, _ in mine),
                    y=tuple(error for _, error in mine),
                )
            )
    return found


def _signs(one: Measured) -> str:
    return "scales of both signs" if one.signed else "positive scales"


def _error(one: Measured) -> str:
    return "no number" if one.error is None else f"relative error {one.error:.2g}"
