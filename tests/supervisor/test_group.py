# SPDX-License-Identifier: Apache-2.0
"""Which processes serving depends on, by vLLM's titles and the ranks' records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kimi_k3.supervisor import group as group_module
from kimi_k3.supervisor.group import Group, named
from kimi_k3.supervisor.processes import Mark
from tests.supervisor.test_pure import rank
from tests.wheels import VERSIONS, vllm_source

MARK = Mark("s1", Path("/a"), session=5)


def process(proc: Path, pid: int, title: str, *, state: str = "S", began: int = 1) -> None:
    """A process of the engine's session."""
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "environ").write_text("")
    (proc / str(pid) / "cmdline").write_text(title)
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b) {state} 0 5 5 {'0 ' * 15}{began} 0")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    process(tmp_path, 5, "python\0-m\0vllm")
    process(tmp_path, 6, "VLLM::EngineCore\0\0\0")
    process(tmp_path, 7, "VLLM::Worker_TP0_EP0")
    process(tmp_path, 8, "VLLM::Worker_TP1_EP1\0rest")
    process(tmp_path, 9, "python\0-c\0from torch._inductor.compile_worker")
    return tmp_path


def gone(group: Group) -> list[str]:
    return [member.name for member in group.gone()]


def test_each_that_serving_needs_is_missed(proc: Path) -> None:
    """Also as a zombie, and when its number is another's by now; a compiler's end is none of our business."""
    group = Group(MARK, proc=proc)
    group.find()
    assert gone(group) == []
    (proc / "9" / "stat").unlink()
    assert gone(group) == []
    process(proc, 7, "VLLM::Worker_TP0_EP0", state="Z")
    process(proc, 8, "something else", began=900)
    group.find()
    assert gone(group) == ["Worker_TP0_EP0", "Worker_TP1_EP1"]
    (proc / "6" / "stat").unlink()
    assert [member.name for member in group.gone() if member.is_core] == ["EngineCore"]
    (proc / "5" / "stat").unlink()
    assert "API server" in gone(group)


def test_one_that_died_between_two_looks(proc: Path) -> None:
    """The kernel keeps the beginning of a zombie's name; one of another session is none of ours."""
    group = Group(MARK, proc=proc)
    for pid, session in ((11, 5), (12, 77)):
        process(proc, pid, "", state="Z")
        (proc / str(pid) / "stat").write_text(f"{pid} (VLLM::Worker_TP) Z 6 5 {session} {'0 ' * 15}1 0")
    group.find()
    assert gone(group) == ["Worker_TP"]
    process(proc, 13, "VLLM::EngineCore")
    (proc / "13" / "stat").write_text(f"13 (VLLM::EngineCor) Z 5 5 5 {'0 ' * 15}1 0")
    group.find()
    assert [member.is_core for member in group.gone()] == [False, True]


def test_a_fork_that_still_bears_its_parents_title(proc: Path) -> None:
    """A worker that runs a compiler forks; the fork's end, a moment later, is nobody's death."""
    group = Group(MARK, proc=proc)
    for pid, title, parent, state in (
        (30, "VLLM::Worker_TP0_EP0", 7, "S"),
        (31, "VLLM::EngineCore", 6, "S"),
        (32, "", 7, "Z"),
    ):
        process(proc, pid, title)
        (proc / str(pid) / "stat").write_text(f"{pid} (VLLM::Worker_TP) {state} {parent} 5 5 {'0 ' * 15}1 0")
    group.find()
    (proc / "30" / "stat").unlink()
    assert gone(group) == []
    process(proc, 31, "VLLM::Worker_TP2_EP2")
    group.find()
    (proc / "31" / "stat").unlink()
    assert gone(group) == ["Worker_TP2_EP2"]


def test_strangers_are_looked_at_once(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine has a thousand processes, and a start looks ten times a second."""
    (proc / "20").mkdir()
    (proc / "20" / "environ").write_text("HOME=/")
    group = Group(MARK, proc=proc)
    group.find()
    seen: list[str] = []
    monkeypatch.setattr(group_module, "belongs", lambda entry, *_, **__: seen.append(entry.name))
    group.find()
    assert "20" not in seen
    assert "9" in seen


def test_a_title_that_changes_is_the_same_process(proc: Path) -> None:
    """A worker is called Worker until its groups are set up."""
    process(proc, 7, "VLLM::Worker")
    group = Group(MARK, proc=proc)
    group.find()
    process(proc, 7, "VLLM::Worker_TP0")
    group.find()
    (proc / "7" / "stat").unlink()
    assert gone(group) == ["Worker_TP0"]


def test_a_rank_tells_its_pid_itself(proc: Path) -> None:
    """Where a title is missing, the journal tells; where both tell, both are named."""
    process(proc, 10, "python\0-c\0spawn_main")
    group = Group(MARK, proc=proc)
    group.find([rank(0)])
    process(proc, 10, "", state="X")
    assert named(group.gone(), [rank(0)]) == "rank 0 (pid 10)"
    group = Group(MARK, proc=proc)
    group.find()
    process(proc, 8, "", state="Z")
    record = rank(1).model_copy(update={"pid": 8})
    assert named(group.gone(), [record]) == "Worker_TP1_EP1 (pid 8, rank 1)"


def test_stopped_is_not_gone(proc: Path) -> None:
    """A signal stopped it; a tracer's stop (t) is py-spy's look, which takes milliseconds."""
    group = Group(MARK, proc=proc)
    group.find()
    process(proc, 7, "VLLM::Worker_TP0_EP0", state="T")
    process(proc, 8, "VLLM::Worker_TP1_EP1", state="t")
    assert [member.pid for member in group.stopped()] == [7]
    assert gone(group) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_titles_stand_in_vllms_source(version: str) -> None:
    """A title that was reworded would hide a death from us until vLLM tells it itself."""
    source = vllm_source(version)
    executor = (source / "v1/executor/multiproc_executor.py").read_text()
    assert 'process_name = "Worker"' in executor
    assert re.search(r'process_title = "EngineCore"', (source / "v1/engine/core.py").read_text())
    assert 'f"{prefix}::{name}"' in (source / "utils/system_utils.py").read_text()
