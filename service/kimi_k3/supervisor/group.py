# SPDX-License-Identifier: Apache-2.0
"""The processes that serving depends on, and which of them are gone or stopped.

vLLM's API server notices the death of its engine core, and the core that of a worker, as long as they still
turn (vllm-project/vllm#32116). So the supervisor looks itself. vLLM names its processes by their titles
(``VLLM::EngineCore``, ``VLLM::Worker_TP0``); helpers that come and go, as compilers, have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.journal.models import RankRecord
from kimi_k3.supervisor.processes import PROC, Mark, belongs, stat_of

_TITLE = re.compile(rb"[^\0]*::((?:EngineCore|Worker|APIServer|DPCoordinator)(?:_[A-Za-z]+\d+)*)\s*(?:\0|$)")
"""``VLLM_PROCESS_NAME_PREFIX::NAME``; a title may be followed by what is left of the old command line."""

_SHORT_TITLE = re.compile(r"\d+ \([^:]*::((?:EngineCor|Worker|APIServer|DPCoordin)[^)]*)\)")
"""The same in the 15 characters that the kernel keeps, also of a zombie; from ``/proc/PID/stat``."""
_CUT = {"EngineCor": "EngineCore", "DPCoordin": "DPCoordinator"}

MAIN = "API server"
HEADLESS = "headless engine"


@dataclass(frozen=True)
class Member:
    """A process that serving depends on.

    Attributes:
        pid: its number.
        began: when it began, in the kernel's ticks: a later process of the same number is another.
        name: in an operator's words.
    """

    pid: int
    began: str
    name: str

    @property
    def is_core(self) -> bool:
        """Whether it is an engine core, without which nothing is computed."""
        return self.name.startswith("EngineCore")


class Group:
    """Remembers every process that serving depends on, so that one that is gone is missed."""

    def __init__(self, mark: Mark, *, main: str = MAIN, proc: Path = PROC) -> None:
        self._mark = mark
        self._proc = proc
        self._members: dict[int, Member] = {}
        self._others: set[int] = set()
        if mark.session is not None:
            self._remember(mark.session, main)

    def find(self, ranks: Iterable[RankRecord] = ()) -> None:
        """Look for processes that are new, and for titles that have changed.

        Cheap enough for every look: of a machine's thousand processes only those that are new are opened.
        One that was killed since the last look is found as a zombie, unless its parent knows already.

        Args:
            ranks: what the ranks of this start reported; each tells its pid, titled or not.
        """
        present = {int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit()}
        self._others &= present
        for pid in sorted(present - self._others - {self._mark.session}):
            entry = self._proc / str(pid)
            ours = belongs(entry, self._mark, proc=self._proc)
            name = _title(entry) if ours else _title_of_zombie(entry, self._mark.session)
            if name is not None:
                self._remember(pid, name)
            elif not ours:
                self._others.add(pid)
        for rank in ranks:
            if rank.pid not in self._members:
                self._remember(rank.pid, f"rank {rank.rank}")

    @property
    def pids(self) -> tuple[int, ...]:
        """Numbers of those that are known, also of those that are gone."""
        return tuple(self._members)

    def gone(self) -> tuple[Member, ...]:
        """Those that no longer run."""
        return tuple(member for member in self._members.values() if self._state(member) in (None, "Z", "X"))

    def stopped(self) -> tuple[Member, ...]:
        """Those that a signal has stopped: they compute nothing until somebody continues them."""
        return tuple(member for member in self._members.values() if self._state(member) == "T")

    def _remember(self, pid: int, name: str) -> None:
        stat = stat_of(self._proc / str(pid))
        if stat and self._is_helper(int(stat[1]), name):
            return
        known = self._members.get(pid)
        if stat and (known is None or known.began == stat[19]):
            self._members[pid] = Member(pid, stat[19], name)

    def _is_helper(self, parent: int, name: str) -> bool:
        """Whether a process bears its parent's title: a fork that has not become what it will be.

        A worker that runs a compiler forks; such a process is gone a moment later, and nobody misses it. A
        zombie's title is cut, so it is the beginning of its parent's.
        """
        member = self._members.get(parent)
        return member is not None and member.name.startswith(name)

    def _state(self, member: Member) -> str | None:
        stat = stat_of(self._proc / str(member.pid))
        return stat[0] if stat and stat[19] == member.began else None


def _title(entry: Path) -> str | None:
    try:
        match = _TITLE.match((entry / "cmdline").read_bytes())
    except OSError:
        return None
    return None if match is None else match[1].decode()


def _title_of_zombie(entry: Path, session: int | None) -> str | None:
    """What is left of the title of a process of the session that nobody has waited for."""
    stat = stat_of(entry)
    if not stat or stat[0] != "Z" or int(stat[3]) != session:
        return None
    try:
        match = _SHORT_TITLE.match((entry / "stat").read_text())
    except OSError:
        return None
    if match is None:
        return None
    return _CUT.get(match[1], match[1])


def named(members: Iterable[Member], ranks: Iterable[RankRecord]) -> str:
    """Members in an operator's words: a worker with its rank, where a rank reported its pid."""
    by_pid = {rank.pid: rank.rank for rank in ranks}
    return ", ".join(_names(members, by_pid))


def _names(members: Iterable[Member], by_pid: dict[int, int]) -> Iterator[str]:
    for member in sorted(members, key=lambda each: each.pid):
        rank = by_pid.get(member.pid)
        also = "" if rank is None or member.name == f"rank {rank}" else f", rank {rank}"
        yield f"{member.name} (pid {member.pid}{also})"
