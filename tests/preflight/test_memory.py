# SPDX-License-Identifier: Apache-2.0
"""Shared memory, control groups, read-ahead and limits, on a made-up node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.checkpoint import inspect_checkpoint, make_tiny_checkpoint
from kimi_k3.preflight.finding import Finding, State
from kimi_k3.preflight.limits import check_limits, parse_limits
from kimi_k3.preflight.machine import Machine, Space
from kimi_k3.preflight.memory import check_memory, check_shared_memory
from kimi_k3.preflight.subject import Subject

from .node import GIB, Node, subject

MIB = 2**20
MAIN = "/sys/fs/cgroup/kubepods/pod1/main"


def memory(node: Node, checked: Subject | None = None) -> Finding:
    return next(iter(check_memory(node.machine, checked or subject())))


@pytest.mark.parametrize(
    ("total", "free", "profile", "state"),
    [
        (128 * GIB, 127 * GIB, "ep8", State.PASS),
        (64 * MIB, 64 * MIB, "ep8", State.FAIL),
        (63 * GIB, 60 * GIB, "ep8", State.WARN),
        (128 * GIB, 0, "ep8", State.FAIL),
        (64 * MIB, 64 * MIB, "cpu-tiny", State.FAIL),
        (160 * MIB, 160 * MIB, "cpu-tiny", State.PASS),
    ],
)
def test_shared_memory(node: Node, total: int, free: int, profile: str, state: State) -> None:
    """A container's default of 64 MiB is a bus error (vllm-project/vllm#1710); full is as bad."""
    node.shm = Space(total, free)
    assert check_shared_memory(node.machine, subject(profile)).state is state


def test_no_shared_memory(tmp_path: Path) -> None:
    """A root without ``/dev/shm`` is a failure, not a traceback."""
    assert check_shared_memory(Machine(root=tmp_path), subject()).state is State.FAIL


def test_no_limit(node: Node) -> None:
    """The machine's memory is then what counts."""
    finding = memory(node)
    assert finding.state is State.PASS
    assert finding.what.startswith("the machine has 2048.0 GiB")


@pytest.mark.parametrize("group", ["/sys/fs/cgroup/kubepods/pod1", MAIN])
def test_a_limit_of_any_level(node: Node, group: str) -> None:
    """A pod's limit kills like a container's; the smallest counts, with what its memory is used for."""
    node.write(f"{group}/memory.max", f"{4 * GIB}\n")
    finding = memory(node)
    assert finding.state is State.FAIL
    assert f"control group {group.removeprefix('/sys/fs/cgroup')} (version 2) has 4.0 GiB" in finding.what
    assert "(anonymous 1.0 GiB, page cache 1.5 GiB, shared 512 MiB in use)" in finding.what


def test_the_smallest_limit_counts(node: Node) -> None:
    """Whichever level has it."""
    node.write(f"{MAIN}/memory.max", f"{900 * GIB}\n")
    node.write("/sys/fs/cgroup/kubepods/memory.max", f"{800 * GIB}\n")
    assert "control group /kubepods (version 2) has 800.0 GiB" in memory(node).what


def test_a_limit_that_may_be_too_low(node: Node) -> None:
    """What ranks take is an estimate, so it only warns; shared memory counts (vllm-project/vllm#57469)."""
    node.write(f"{MAIN}/memory.max", f"{40 * GIB}\n")
    finding = memory(node)
    assert finding.state is State.WARN
    assert "shared memory counts, too" in (finding.remedy or "")


def test_a_limit_of_version_1(node: Node) -> None:
    """Older hosts; the kernel there writes a huge number for no limit."""
    node.write("/proc/self/cgroup", "9:memory:/docker/abc\n0::/\n")
    group = "/sys/fs/cgroup/memory/docker/abc"
    node.write(f"{group}/memory.usage_in_bytes", f"{GIB}\n")
    node.write(f"{group}/memory.stat", f"total_rss {GIB}\ntotal_cache {GIB}\ntotal_shmem {GIB // 4}\n")
    node.write(f"{group}/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory(node).state is State.PASS
    node.write(f"{group}/memory.limit_in_bytes", f"{2 * GIB}\n")
    finding = memory(node)
    assert finding.state is State.FAIL
    assert "(version 1) has 2.0 GiB (anonymous 1.0 GiB, page cache 768 MiB, shared 256 MiB" in finding.what


def test_nothing_can_be_read(tmp_path: Path) -> None:
    """Unknown, with what to mount."""
    (finding,) = check_memory(Machine(root=tmp_path), subject())
    assert finding.state is State.UNKNOWN


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny_checkpoint(directory)
    return directory


def test_read_ahead_of_more_than_there_is(node: Node, tiny: Path) -> None:
    """Prefetch into too little memory reads everything twice; a lazy profile has no such check."""
    checkpoint = inspect_checkpoint(tiny)
    checked = replace(subject("tp8"), checkpoint=checkpoint)
    states = [finding.state for finding in check_memory(node.machine, checked)]
    assert states == [State.PASS, State.PASS]
    large = replace(checkpoint, total_bytes=1_560_860_324_864)
    node.write("/proc/meminfo", f"MemTotal: {2**30} kB\n")
    findings = list(check_memory(node.machine, replace(checked, checkpoint=large)))
    assert findings[1].check == "memory-read-ahead"
    assert findings[1].state is State.WARN
    assert "1024.0 GiB of memory for a checkpoint of 1453.7 GiB" in findings[1].what
    assert len(list(check_memory(node.machine, replace(subject("ep8"), checkpoint=large)))) == 1


def test_limits_of_a_prepared_container(node: Node) -> None:
    """vLLM raises its soft limit of files itself, so the hard one counts."""
    assert [finding.state for finding in check_limits(node.machine)] == [State.PASS] * 3


@pytest.mark.parametrize(
    ("old", "new", "check", "flag"),
    [
        (
            "memory         unlimited  ",
            "memory         8388608  ",
            "limit-memlock",
            "memlock=-1",
        ),
        ("1048576  ", "4096  ", "limit-nofile", "nofile=65535"),
        ("67108864 ", "8388608 ", "limit-stack", "stack=67108864"),
    ],
)
def test_a_low_limit(node: Node, old: str, new: str, check: str, flag: str) -> None:
    """The remedy is what published starts give docker."""
    path = node.root / "proc/self/limits"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    (finding,) = [finding for finding in check_limits(node.machine) if finding.state is not State.PASS]
    assert (finding.check, finding.state) == (check, State.WARN)
    assert flag in (finding.remedy or "")


def test_limits_that_cannot_be_read(tmp_path: Path) -> None:
    """Unknown each, never a pass."""
    assert [finding.state for finding in check_limits(Machine(root=tmp_path))] == [State.UNKNOWN] * 3


def test_this_process_has_limits() -> None:
    """The kernel's own file is understood."""
    found = parse_limits(Path("/proc/self/limits").read_text())
    assert {"Max locked memory", "Max open files", "Max stack size"} <= set(found)


@given(st.text())
def test_any_limits(text: str) -> None:
    """Nothing in that file may end the check."""
    parse_limits(text)


@given(st.text(), st.text(), st.text())
def test_any_control_group(
    tmp_path_factory: pytest.TempPathFactory, path: str, limit: str, stat: str
) -> None:
    """Nothing in the kernel's files may end the check."""
    node = Node(tmp_path_factory.mktemp("any"))
    for name, text in (
        ("/proc/self/cgroup", f"0::{path}"),
        ("/sys/fs/cgroup/memory.max", limit),
        ("/sys/fs/cgroup/memory.stat", stat),
    ):
        node.write(name, "").write_bytes(text.encode("utf-8", "surrogatepass"))
    list(check_memory(node.machine, subject()))
