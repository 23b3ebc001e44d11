# SPDX-License-Identifier: Apache-2.0
"""What AITER's entry printed, understood: what failed, where and why. Pure.

Its exit code alone is no answer: it is 0 when kernels were skipped because their names are not known, and
when there was nothing to do. Older entries report per kernel, the newer one per row of the table.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import dataclass, field

from kimi_k3.words.text import printable

LONGEST_REASON = 300

Sizes = tuple[int, int, int, int]
"""model_dim, inter_dim, experts, topk."""

_SIZES = r"E=(\d+) topk=(\d+)"
_KERNEL = re.compile(
    rf"\[FAIL\] compile\s+(\S+)\s+model_dim=(\d+) inter_dim=(\d+) {_SIZES}\s+arch=\S*?: (.*)"
)
_ROW = re.compile(
    rf"\[FAIL\] (\S+) \| (\S+)\s+token=(\d+) m=\d+ dims=\((\d+),(\d+)\) {_SIZES}\s.*?arch=\S*?: (.*)"
)
_OTHER = re.compile(r"\[FAIL\] (.*)")
_UNKNOWN = re.compile(r"\[WARN\] Unknown kernel name: (\S+?),? skipping")
_CRASH = re.compile(
    r"\[aiter\] FlyDSL (.+?) (?:worker crashed \(exitcode=(-?\d+)\)|(exceeded .*?; killed)); "
    r"retry (\d+)/(\d+)"
)
_BEGIN = re.compile(r"\[aiter\] FlyDSL AOT: (\d+) kernels, \d+ worker")
_DONE = re.compile(r"\.\.\. (\d+)/(\d+) kernels done")
_PER_KERNEL = re.compile(r"Compiled:\s+(\d+) ok, (\d+) failed")
_PER_ROW = re.compile(r"FlyDSL MoE replay \S+: (\d+) ok, (\d+) failed, (\d+) unsupported")
_MISSING = re.compile(r"no usable AOT cache for (\w+)")
_NOT_WRITTEN = re.compile(r"Failed to (?:write compile|save) cache.*")
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")
_INVALID = "Invalid FlyDSL kernel name"
_READY = "Cache is ready."
_LLVM = "LLVM ERROR"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that AITER did not compile, or did not find.

    Attributes:
        kernels: their names; empty where it does not tell.
        sizes: of the shape, if it tells.
        tokens: of the row, if it tells.
        why: in its own words, or LLVM's.
        missing: the launcher that is not in the cache, of a run that may only look there.
        skipped: whether the name is not known to it.
    """

    kernels: tuple[str, ...] = ()
    sizes: Sizes | None = None
    tokens: int | None = None
    why: str
    missing: str | None = None
    skipped: bool = False

    def __str__(self) -> str:
        """What, where, why."""
        what = " | ".join(self.kernels) or "AITER's compiler"
        where = "" if self.sizes is None else " at model_dim={} inter_dim={} E={} topk={}".format(*self.sizes)
        tokens = "" if self.tokens is None else f" tokens={self.tokens}"
        return f"{what}{where}{tokens}: {self.why}"


@dataclass
class Transcript:
    """The lines of one run, fed as they come.

    Attributes:
        done, total: jobs; ``None`` as long as it did not tell.
        ready: whether it said that the cache is ready.
    """

    done: int = 0
    total: int | None = None
    ready: bool = False
    _named: list[Failure] = field(default_factory=list)
    _failed_lines: int = 0
    _crashes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _last_chances: int = 0
    _summary: tuple[int, int, int] | None = None
    _per_row: bool = False
    _llvm: list[str] = field(default_factory=list)
    _exception: list[str] = field(default_factory=list)
    _last: str = ""

    def feed(self, line: str) -> bool:
        """Take a line.

        Returns:
            Whether :attr:`done` or :attr:`total` changed.
        """
        line = printable(" ".join(line.split()))
        self._last = line
        if match := _BEGIN.search(line):
            self.total = int(match[1])
            return True
        if match := _DONE.search(line):
            self.done, self.total = int(match[1]), int(match[2])
            return True
        self._understand(line)
        return False

    def _understand(self, line: str) -> None:
        if _LLVM in line:
            self._llvm.append(line[line.index(_LLVM) :])
        elif failure := _failure(line):
            self._failed_lines += 1
            self._add(failure)
        elif match := _UNKNOWN.search(line):
            self._add(Failure(kernels=(match[1],), why="AITER knows no kernel of that name", skipped=True))
        elif match := _CRASH.search(line):
            name, code, slow, attempt, attempts = match.groups()
            if attempt == attempts:
                self._crashes[name, slow or ended(int(code))] += 1
                self._last_chances += 1
        elif match := _PER_KERNEL.search(line):
            self._summary = (int(match[1]), int(match[2]), 0)
        elif match := _PER_ROW.search(line):
            ok, failed, unsupported = (int(number) for number in match.groups())
            self._summary, self._per_row = (ok, failed, unsupported), True
        elif match := _NOT_WRITTEN.search(line):
            self._add(Failure(why=match[0]))
        elif _EXCEPTION.fullmatch(line):
            self._exception.append(line)
        self.ready = self.ready or _READY in line

    def _add(self, failure: Failure) -> None:
        # One row fails in each of its variants, and one name is unknown in each of its rows.
        if failure not in self._named:
            self._named.append(failure)

    @property
    def crashed(self) -> str | None:
        """How the last process that compiled a kernel was ended, if one was."""
        return list(self._crashes)[-1][1] if self._crashes else None

    @property
    def accounted(self) -> bool:
        """Whether every failure that it counts has a name."""
        return self._summary is not None and self._summary[1] <= self._failed_lines + self._last_chances

    def failures(self, code: int | None, *, rows: int, kernels: int) -> tuple[Failure, ...]:
        """Everything that went wrong, at least one if it did not go well.

        Args:
            code: how the run ended; ``None`` if its time was up.
            rows: that the table has.
            kernels: that these rows name, each row's counted.
        """
        found = [*self._named, *self._crashed()]
        if code is None:
            found.append(Failure(why="the time was up"))
        elif self._summary is not None and not self.accounted:
            found.append(Failure(why=f"{self._summary[1]} failures counted, and not all of them named"))
        elif not found and (code != 0 or not self.ready):
            found.append(Failure(why=f"{ended(code)}: {self.reason()}"))
        expected = rows if self._per_row else kernels
        if not found and (self._summary is None or self._summary[0] < expected):
            told = "none" if self._summary is None else str(self._summary[0])
            found.append(
                Failure(why=f"it counts {told} as compiled, of {expected}: it does not read this table")
            )
        return tuple(found)

    def _crashed(self) -> list[Failure]:
        failed = 0 if self._summary is None else self._summary[1]
        # Whoever crashed and came through at the last attempt is not counted as failed.
        if self._summary is not None and failed <= self._failed_lines:
            return []
        why = f": {self._llvm[-1][:LONGEST_REASON]}" if self._llvm else ""
        return [
            Failure(kernels=tuple(name.split(" | ")), why=f"its compiler {how}{why}")
            for name, how in self._crashes
        ]

    def reason(self) -> str:
        """The line that says most: LLVM's, else a failure's, else an exception's, else the last one."""
        named = [failure.why for failure in self._named]
        told = self._llvm or named or self._exception or [self._last]
        return told[-1][:LONGEST_REASON] or "it said nothing"


def ended(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was ended by {name}"


def _failure(line: str) -> Failure | None:
    if match := _KERNEL.search(line):
        name, model, inter, experts, topk, why = match.groups()
        kernels: tuple[str, ...] = (name,)
        tokens = None
    elif match := _ROW.search(line):
        first, second, token, model, inter, experts, topk, why = match.groups()
        kernels, tokens = (first, second), int(token)
    elif match := _OTHER.search(line):
        return Failure(why=match[1][:LONGEST_REASON])
    else:
        return None
    missing = _MISSING.search(why)
    return Failure(
        kernels=kernels,
        sizes=(int(model), int(inter), int(experts), int(topk)),
        tokens=tokens,
        why=why[:LONGEST_REASON],
        missing=None if missing is None else missing[1],
        skipped=_INVALID in why,
    )
