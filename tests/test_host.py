# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3.host import read_cgroup_memory, read_host_memory

MEMINFO = """MemTotal:       2113536000 kB
MemFree:          1000000 kB
MemAvailable:   2000000000 kB
HugePages_Total:       0
Shmem:             16384 kB
"""


def tree(root: Path, files: dict[str, str]) -> Path:
    """A made-up file system."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_meminfo(tmp_path: Path) -> None:
    """The kernel counts in KiB although it writes kB."""
    host = read_host_memory(tree(tmp_path, {"meminfo": MEMINFO}))
    assert (host.total_bytes, host.available_bytes, host.shmem_bytes) == (
        2113536000 * 1024,
        2000000000 * 1024,
        16384 * 1024,
    )


def test_v2_in_a_container(tmp_path: Path) -> None:
    """A container sees its own group at the mount's root; shared memory counts in its limit."""
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/\n"})
    cgroup = tree(
        tmp_path / "cgroup",
        {
            "memory.max": "1000\n",
            "memory.current": "600\n",
            "memory.peak": "700\n",
            "memory.stat": "anon 300\nfile 290\nshmem 250\n",
            "memory.events": "low 0\noom 2\noom_kill 1\n",
        },
    )
    seen = read_cgroup_memory(proc, cgroup)
    assert seen is not None
    assert seen.model_dump() == {
        "version": 2,
        "path": "/",
        "limited": True,
        "limit_bytes": 1000,
        "used_bytes": 600,
        "peak_bytes": 700,
        "shmem_bytes": 250,
        "oom_kills": 1,
    }


def test_v2_tightest_level_counts(tmp_path: Path) -> None:
    """The kernel kills at whichever level is full first, e.g. the pod's and not the container's."""
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/pod/box\n"})
    cgroup = tree(
        tmp_path / "cgroup",
        {
            "pod/box/memory.max": "max\n",
            "pod/box/memory.current": "10\n",
            "pod/memory.max": "500\n",
            "pod/memory.current": "20\n",
        },
    )
    seen = read_cgroup_memory(proc, cgroup)
    assert seen is not None
    assert (seen.path, seen.limit_bytes, seen.used_bytes, seen.shmem_bytes) == ("/pod", 500, 20, None)


def test_v2_without_a_limit(tmp_path: Path) -> None:
    """No limit is known to be none; it is not an unknown limit."""
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/box\n"})
    cgroup = tree(tmp_path / "cgroup", {"box/memory.max": "max\n", "box/memory.current": "10\n"})
    seen = read_cgroup_memory(proc, cgroup)
    assert seen is not None
    assert (seen.path, seen.limited, seen.limit_bytes, seen.used_bytes) == ("/box", False, None, 10)


@pytest.mark.parametrize(("limit", "limited"), [("4096", True), ("9223372036854771712", False)])
def test_v1(tmp_path: Path, limit: str, limited: bool) -> None:
    """Version 1 writes a huge number for no limit, and names the groups below it with total_."""
    proc = tree(tmp_path / "proc", {"self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n"})
    cgroup = tree(
        tmp_path / "cgroup",
        {
            "memory/box/memory.limit_in_bytes": limit,
            "memory/box/memory.usage_in_bytes": "77",
            "memory/box/memory.max_usage_in_bytes": "99",
            "memory/box/memory.stat": "shmem 1\ntotal_shmem 5\n",
            "memory/box/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        },
    )
    seen = read_cgroup_memory(proc, cgroup)
    assert seen is not None
    assert (seen.version, seen.limited, seen.limit_bytes) == (1, limited, 4096 if limited else None)
    assert (seen.used_bytes, seen.peak_bytes, seen.shmem_bytes, seen.oom_kills) == (77, 99, 5, 3)


@pytest.mark.parametrize("line", ["", "nonsense", "0::/../..", "0::/gone", "::::", "4:memory:/gone"])
def test_nothing_to_see(tmp_path: Path, line: str) -> None:
    """A machine without control groups, or a group outside the namespace, is unknown and no error."""
    proc = tree(tmp_path / "proc", {"self/cgroup": line})
    assert read_cgroup_memory(proc, tmp_path / "cgroup") is None


def test_group_outside_the_namespace_is_not_followed(tmp_path: Path) -> None:
    """A path with .. would lead out of the mount."""
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/../other\n"})
    tree(tmp_path, {"other/memory.max": "1\n", "cgroup/memory.max": "2\n"})
    seen = read_cgroup_memory(proc, tmp_path / "cgroup")
    assert seen is not None
    assert seen.limit_bytes == 2


@pytest.mark.parametrize("text", ["-1", "max", "", "1e3", "9" * 5000, "\xb2"])
def test_foreign_numbers(tmp_path: Path, text: str) -> None:
    """What is no number is unknown."""
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/\n"})
    cgroup = tree(tmp_path / "cgroup", {"memory.max": "10", "memory.current": text})
    seen = read_cgroup_memory(proc, cgroup)
    assert seen is not None
    assert seen.used_bytes is None
