# SPDX-License-Identifier: Apache-2.0
"""``docs/failures.md``, made by ``python -m kimi_k3.diagnosis.document docs/failures.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kimi_k3.diagnosis.catalogue import Catalogue, Failure, Grade, Level, Mark, load_catalogue

_HEAD = """\
<!-- Made from diagnosis/catalogue.yaml by: python -m kimi_k3.diagnosis.document docs/failures.md -->

# Known failures

What `kimi-k3 doctor` and the supervisor recognise, by what an entry explains, the best first. Of several that
fit, the one of the better kind is the answer, then the one that needs more than one line, then the earliest
line. An error that the engine outlived (it went on to serve, or answered 20 completions after it) is none. Of
what vLLM prints after a signal asked it to end, only roots and general errors count. A notice is no cause. A
number in brackets is that of the survey of Kimi-K3's failures on gfx942 from which the product was built.

How well a signature is known:
"""


def failures_document() -> str:
    """The document, as it must stand in ``docs/failures.md``."""
    return "\n".join(_lines(load_catalogue()))


def _lines(catalogue: Catalogue) -> Iterator[str]:
    yield _HEAD
    for grade in Grade:
        yield f"* {grade}: {grade.description}"
    for level in Level:
        yield ""
        yield f"## {level.capitalize()}: {level.description}"
        for failure in catalogue.failures:
            if failure.level is level:
                yield ""
                yield from _entry(failure, catalogue)
    yield ""


def _entry(failure: Failure, catalogue: Catalogue) -> Iterator[str]:
    covers = f" ({', '.join(map(str, failure.covers))})" if failure.covers else ""
    phase = f" in phase {failure.phase}" if failure.phase else ""
    yield f"### {failure.name}{covers}"
    yield ""
    yield f"* Cause{phase}: {_plain(failure.cause)}"
    yield f"* Remedy: {_plain(failure.remedy)}"
    signs = list(_signs(failure, catalogue))
    if signs:
        yield f"* Recognised by {' and '.join(signs)}"
    yield f"* Source ({failure.grade}): {_plain(failure.source)}"


def _signs(failure: Failure, catalogue: Catalogue) -> Iterator[str]:
    if failure.silent:
        yield "an empty log"
    own = _sign(failure)
    if own:
        yield own
    for name in failure.when:
        yield _sign(catalogue.marks[name])
    for name in failure.unless:
        yield f"no {_sign(catalogue.marks[name])}"
    if failure.until is not None:
        yield f"no {_sign(catalogue.marks[failure.until])} after it"


def _sign(of: Failure | Mark) -> str:
    signs = [_code(of.pattern)] if of.pattern else []
    if of.exit_codes:
        signs.append(f"exit code {', '.join(map(_exit_code, of.exit_codes))}")
    return " or ".join(signs)


def _exit_code(code: int) -> str:
    return f"{code} ({128 - code})" if code < 0 else str(code)


def _code(text: str) -> str:
    return f"``{text}``" if "`" in text else f"`{text}`"


def _plain(text: str) -> str:
    """Text without what Markdown would take for itself."""
    return text.replace("*", "\\*").replace("<", "\\<")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(failures_document(), encoding="utf-8")
