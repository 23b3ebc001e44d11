# SPDX-License-Identifier: Apache-2.0
"""GPUs: the right ones, enough, whole, free, and openable; each broken in one place on a made-up node."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.preflight.access import check_access
from kimi_k3.preflight.finding import Finding, State
from kimi_k3.preflight.gpus import check_gpus
from kimi_k3.preflight.kfd import architecture, parse_properties, read_gpus

from .node import GIB, GPU_NODE, USER, VRAM, Node, subject


def gpu_findings(node: Node, profile: str = "ep8", *, wait_vram: float = 0.0) -> dict[str, Finding]:
    machine = node.machine
    found = check_gpus(machine, subject(profile, wait_vram=wait_vram), read_gpus(machine))
    return {finding.check: finding for finding in found}


def only_failure(findings: dict[str, Finding]) -> Finding:
    (failure,) = [finding for finding in findings.values() if finding.state is not State.PASS]
    return failure


def test_a_healthy_node(node: Node) -> None:
    """All pass, with evidence that an operator can compare with amd-smi."""
    found = gpu_findings(node)
    assert {finding.state for finding in found.values()} == {State.PASS}
    assert found["gpu-architecture"].what == "8 x gfx942 (AMD Instinct MI325X)"
    assert found["gpu-partition"].what == "8 x SPX/NPS1"
    assert check_access(node.machine, read_gpus(node.machine)).state is State.PASS


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110501, "gfx1151")]
)
def test_names_of_architectures(version: int, name: str) -> None:
    """KFD writes decimal numbers, LLVM hexadecimal digits."""
    assert architecture(version) == name


def test_gpus_of_another_generation(node: Node) -> None:
    """int4 is for gfx942; gfx950 would ignore the request."""
    text = GPU_NODE.format(version=90500, device=0x75A3, location=0, minor=128)
    node.write("/sys/class/kfd/kfd/topology/nodes/1/properties", text)
    failure = only_failure(gpu_findings(node))
    assert failure.check == "gpu-architecture"
    assert "1 x gfx950 (AMD Instinct MI355X)" in failure.what


def test_too_few_gpus(node: Node) -> None:
    """A container that was given seven of eight."""
    node.remove("/sys/class/kfd/kfd/topology/nodes/8")
    assert "7 GPUs can be used, the start needs 8" in only_failure(gpu_findings(node)).what


def test_gpus_kept_by_a_device_cgroup(node: Node) -> None:
    """The kernel lists them and refuses to tell of them; only those that are left count."""
    properties = "/sys/class/kfd/kfd/topology/nodes/8/properties"
    node.remove(properties)
    # What root cannot read either, as a stand-in for EPERM.
    (node.root / properties.lstrip("/")).mkdir()
    assert "7 GPUs can be used, 1 more are kept" in only_failure(gpu_findings(node)).what


@pytest.mark.parametrize("name", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_gpus_hidden_by_the_environment(node: Node, name: str) -> None:
    """ROCm shows only those; an inherited variable of a batch system is easily forgotten."""
    node.environment[name] = "0,1,2,3"
    failure = only_failure(gpu_findings(node))
    assert f"{name}='0,1,2,3' leaves 4 GPUs" in failure.what


def test_more_gpus_than_ranks(tmp_path: Path, node: Node) -> None:
    """They idle, which is told and is no fault."""
    node.write(
        "/sys/class/kfd/kfd/topology/nodes/9/properties",
        GPU_NODE.format(version=90402, device=0x74A5, location=9, minor=128),
    )
    assert "1 of them will idle" in gpu_findings(node)["gpu-count"].what


def test_no_gpu_at_all(node: Node) -> None:
    """One finding, not five that follow from it."""
    node.remove("/sys/class/kfd/kfd/topology")
    assert list(gpu_findings(node)) == ["gpu-count"]


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("current_compute_partition", "CPX", "compute partitions 1 x CPX/NPS1"),
        ("current_memory_partition", "NPS4", "1 x SPX/NPS4"),
    ],
)
def test_a_partitioned_gpu(node: Node, name: str, value: str, part: str) -> None:
    """Eight GPUs of a device plugin can be eight slices of one (ROCm/k8s-device-plugin#184)."""
    node.write(node.device(3, name), value + "\n")
    failure = only_failure(gpu_findings(node))
    assert failure.check == "gpu-partition"
    assert failure.state is State.FAIL
    assert part in failure.what


def test_a_driver_that_tells_nothing(node: Node) -> None:
    """As in a virtual machine: unknown, never a pass."""
    for gpu in range(8):
        node.remove(node.device(gpu, ""))
    states = {finding.check: finding.state for finding in gpu_findings(node).values()}
    assert states["gpu-partition"] is State.UNKNOWN
    assert states["gpu-memory"] is State.UNKNOWN
    assert states["gpu-memory-free"] is State.UNKNOWN


def test_gpus_with_less_memory(node: Node) -> None:
    """An MI300X has the same architecture and 192 GiB, too little for one node."""
    node.write(node.device(0, "mem_info_vram_total"), f"{192 * GIB}\n")
    assert only_failure(gpu_findings(node)).check == "gpu-memory"


def test_memory_in_use(node: Node) -> None:
    """What vLLM itself would refuse half a minute later, with the processes that use it."""
    node.write(node.device(5, "mem_info_vram_used"), f"{200 * GIB}\n")
    (node.root / "sys/class/kfd/kfd/proc/4711").mkdir()
    failure = only_failure(gpu_findings(node))
    assert "200.0 GiB on renderD168" in failure.what
    assert "pid 4711" in failure.what


def test_as_much_in_use_as_vllm_allows(node: Node) -> None:
    """``--gpu-memory-utilization 0.95`` leaves a twentieth to others."""
    allowed = VRAM - int(VRAM * 0.95)
    node.write(node.device(5, "mem_info_vram_used"), f"{allowed}\n")
    assert gpu_findings(node)["gpu-memory-free"].state is State.PASS
    node.write(node.device(5, "mem_info_vram_used"), f"{allowed + 1}\n")
    assert gpu_findings(node)["gpu-memory-free"].state is State.FAIL


class Time:
    """A clock that moves when somebody sleeps, and what happens at which second."""

    def __init__(self, events: dict[int, Callable[[], object]]) -> None:
        self.now = 0.0
        self.events = events

    def pause(self, seconds: float) -> bool:
        self.now += seconds
        for moment in [moment for moment in self.events if moment <= self.now]:
            self.events.pop(moment)()
        return True


def test_waiting_for_a_dying_predecessor(node: Node) -> None:
    """Its memory is freed seconds after its end (ROCm/ATOM#2206); without the wait a restart loops."""
    used = node.device(2, "mem_info_vram_used")
    node.write(used, f"{200 * GIB}\n")
    time = Time({12: lambda: node.write(used, "0\n")})
    node.pause, node.clock = time.pause, lambda: time.now
    finding = gpu_findings(node, wait_vram=60)["gpu-memory-free"]
    assert finding.state is State.PASS
    assert "after 12 s" in finding.what


def test_waiting_in_vain(node: Node) -> None:
    """The wait is bounded, and says how long it was."""
    node.write(node.device(2, "mem_info_vram_used"), f"{200 * GIB}\n")
    time = Time({})
    node.pause, node.clock = time.pause, lambda: time.now
    failure = only_failure(gpu_findings(node, wait_vram=7.5))
    assert time.now == 7.5
    assert "in use after 8 s of waiting" in failure.what


def test_an_interrupted_wait(node: Node) -> None:
    """Whoever ends the start does not wait for the GPUs."""
    node.write(node.device(2, "mem_info_vram_used"), f"{200 * GIB}\n")
    node.pause = lambda seconds: False
    assert gpu_findings(node, wait_vram=1000)["gpu-memory-free"].state is State.FAIL


def test_no_gpu_checks_for_a_cpu(node: Node) -> None:
    """Not even as passes: nobody looked."""
    assert gpu_findings(node, "cpu-tiny") == {}


def test_devices_of_another_group(node: Node) -> None:
    """The numbers that an operator needs, and what to write where (ROCm/k8s-device-plugin#39)."""
    kfd = node.root / "dev" / "kfd"
    kfd.chmod(0o660)
    gid = kfd.stat().st_gid
    node.groups = frozenset({gid + 7})
    finding = check_access(node.machine, read_gpus(node.machine))
    assert finding.state is State.FAIL
    assert f"of group {gid} with mode 0660, this process is user {USER} of groups {gid + 7}" in finding.what
    assert finding.remedy is not None
    for fix in (f"--group-add {gid}", f'group_add: ["{gid}"]', f"supplementalGroups: [{gid}]"):
        assert fix in finding.remedy
    node.groups = frozenset({gid})
    assert check_access(node.machine, read_gpus(node.machine)).state is State.PASS


def test_a_group_without_the_right(node: Node) -> None:
    """Joining the group would not help: the mode is wrong."""
    kfd = node.root / "dev" / "kfd"
    kfd.chmod(0o600)
    node.groups = frozenset({kfd.stat().st_gid})
    finding = check_access(node.machine, read_gpus(node.machine))
    assert "chmod" in (finding.remedy or "")


def test_a_missing_render_device(node: Node) -> None:
    """``/dev/kfd`` alone is not enough."""
    node.remove("/dev/dri/renderD136")
    finding = check_access(node.machine, read_gpus(node.machine))
    assert "/dev/dri/renderD136 is not there" in finding.what


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOMEM])
def test_a_device_that_the_kernel_refuses(node: Node, number: int) -> None:
    """A device cgroup and a lost GPU are told apart from permissions."""

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    machine = replace(node.machine, opens=refuse)
    finding = check_access(machine, read_gpus(machine))
    assert finding.state is State.FAIL
    assert os.strerror(number) in finding.what
    assert "group-add" not in (finding.remedy or "")


def test_a_group_that_the_namespace_does_not_have(node: Node) -> None:
    """In a rootless container every foreign group is 65534, and adding that one would not help."""
    kfd = node.root / "dev" / "kfd"
    kfd.chmod(0o660)
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another group")
    os.chown(kfd, -1, 65534)
    finding = check_access(node.machine, read_gpus(node.machine))
    assert "keep-groups" in (finding.remedy or "")
    assert "--group-add 65534" not in (finding.remedy or "")


@given(st.text())
def test_any_properties(text: str) -> None:
    """A driver's file may say anything, and nothing of it may end the check."""
    assert all(value >= 0 for value in parse_properties(text).values())
