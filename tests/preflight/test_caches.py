# SPDX-License-Identifier: Apache-2.0
"""Caches: writable, on a local disk, with what the image has compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.preflight.caches import check_caches
from kimi_k3.preflight.finding import Finding, State
from kimi_k3.preflight.mounts import mount_of, parse_mountinfo

from .node import MOUNTINFO, Node


def caches(node: Node, *, on_gpus: bool = True) -> dict[str, Finding]:
    found = check_caches(node.machine, node.environment, on_gpus=on_gpus)
    return {finding.check: finding for finding in found}


def test_local_caches(node: Node) -> None:
    """Below a home on a local disk; those that only the library can place are not guessed."""
    found = caches(node)
    assert {finding.state for finding in found.values()} == {State.PASS}
    assert found["cache-triton"].what == "/scratch/home/.triton/cache can be written, on xfs"
    assert "cache-aiter-jit" not in found
    assert list(caches(node, on_gpus=False)) == ["cache-vllm"]


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "ceph", "fuse.ceph", "fuse.juicefs", "wekafs", "beegfs", "cifs", "9p"]
)
def test_a_cache_on_a_network(node: Node, kind: str) -> None:
    """Minutes of stall and 154 GiB of small files; the warning names type, mount and what put it there."""
    node.write("/proc/self/mountinfo", MOUNTINFO.replace("xfs /dev/nvme0n1", f"{kind} server:/x"))
    finding = caches(node)["cache-triton"]
    assert finding.state is State.WARN
    assert f"(HOME) is on {kind} at /scratch" in finding.what


def test_file_systems_in_user_space_that_are_local(node: Node) -> None:
    """A rootless container's own root."""
    node.write("/proc/self/mountinfo", MOUNTINFO.replace("xfs /dev/nvme0n1", "fuse.fuse-overlayfs x"))
    assert caches(node)["cache-triton"].state is State.PASS


def test_a_cache_that_cannot_be(node: Node) -> None:
    """A file stands where the directory should be; on a CPU vLLM only complains."""
    node.write("/scratch/file", "")
    node.environment |= {"VLLM_CACHE_ROOT": "/scratch/file/vllm", "TRITON_CACHE_DIR": "/scratch/file"}
    found = caches(node)
    assert found["cache-vllm"].state is State.FAIL
    assert (
        found["cache-vllm"].what == "/scratch/file/vllm (VLLM_CACHE_ROOT): /scratch/file is not a directory"
    )
    assert found["cache-triton"].state is State.FAIL
    assert caches(node, on_gpus=False)["cache-vllm"].state is State.WARN


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"HOME": "/scratch/file"}, "/scratch/file/.cache/vllm (HOME)"),
        ({"HOME": "/x", "XDG_CACHE_HOME": "/scratch/file"}, "/scratch/file/vllm (XDG_CACHE_HOME)"),
        ({"HOME": "/scratch/file", "VLLM_CACHE_ROOT": "~/v"}, "/scratch/file/v (VLLM_CACHE_ROOT)"),
    ],
)
def test_the_variable_to_blame(node: Node, environment: dict[str, str], place: str) -> None:
    """What is not set did not put the cache there."""
    node.write("/scratch/file", "")
    node.environment = environment
    assert caches(node)["cache-vllm"].what == f"{place}: /scratch/file is not a directory"


def test_a_cache_of_another_user(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked: tests may run as root, who writes anywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert caches(node)["cache-vllm"].what.endswith("(HOME): user 1000 cannot write /scratch/home")


def test_code_from_a_mount_without_exec(node: Node) -> None:
    """Compiled kernels are shared objects, which such a mount does not let be loaded."""
    node.write("/proc/self/mountinfo", MOUNTINFO.replace("/scratch rw,relatime", "/scratch rw,noexec"))
    found = caches(node)
    assert found["cache-triton"].state is State.FAIL
    assert found["cache-vllm"].state is State.PASS


@pytest.mark.parametrize(("environment", "state"), [({}, State.UNKNOWN), ({"HOME": "home"}, State.WARN)])
def test_a_home_that_is_none(node: Node, environment: dict[str, str], state: State) -> None:
    """A user without a home, and one whose home depends on where the process stands."""
    node.environment = environment
    assert caches(node)["cache-triton"].state is state


def test_a_redirected_jit_directory(node: Node) -> None:
    """AITER would compile again what the image has; the remedy is the copy."""
    node.environment["AITER_JIT_DIR"] = "/scratch/jit"
    node.write("/site/aiter/jit/module_a.so", "")
    node.write("/site/aiter/jit/module_b.so", "")
    node.write("/scratch/jit/module_a.so", "")
    found = caches(node)
    assert found["cache-aiter-jit"].state is State.PASS
    assert found["cache-aiter-jit-seed"].state is State.WARN
    assert "lacks 1 of the 2 modules" in found["cache-aiter-jit-seed"].what
    node.write("/scratch/jit/module_b.so", "")
    assert caches(node)["cache-aiter-jit-seed"].state is State.PASS


def test_mounts_on_top_of_each_other() -> None:
    """The last one at a place hides those before it; a longer name is not a place below."""
    mounts = parse_mountinfo(
        "1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / /data rw - nfs b rw\n3 1 0:3 / /data rw - xfs c rw\n"
        "4 1 0:4 / /with\\040space rw shared:1 master:2 - tmpfs d rw\nnonsense\n"
    )
    for path, kind in (("/data/x", "xfs"), ("/data", "xfs"), ("/database", "ext4"), ("/with space", "tmpfs")):
        found = mount_of(Path(path), mounts)
        assert found is not None
        assert found.kind == kind


def test_the_mounts_of_this_process() -> None:
    """The kernel's own file is understood: everything is on something."""
    assert mount_of(Path("/proc"), parse_mountinfo(Path("/proc/self/mountinfo").read_text())) is not None


@given(st.text(), st.text())
def test_any_mountinfo(text: str, path: str) -> None:
    """Nothing in that file may end the check."""
    mount_of(Path("/" + path.replace("\0", "")), parse_mountinfo(text))
