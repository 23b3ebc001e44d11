# SPDX-License-Identifier: Apache-2.0
"""The preflight before a start, on a made-up node of eight GPUs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kimi_k3.checkpoint import make_tiny_checkpoint, require_servable
from kimi_k3.checkpoint.index import INDEX_NAME
from kimi_k3.errors import OperatorError
from kimi_k3.preflight.subject import Subject
from kimi_k3.supervisor.serve import check_machine
from tests.kernels.doubles import Generation, install
from tests.ports import free_port
from tests.preflight.node import GIB, Node, mi325x_node, subject

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = mi325x_node(tmp_path / "node")
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (node.search / "vllm").symlink_to(spec.submodule_search_locations[0])
    return node


def test_a_start_waits_and_says_so(node: Node) -> None:
    """Otherwise an operator sees a silent minute; what is only odd is told, and does not end the start."""
    used = node.device(0, "mem_info_vram_used")
    node.write(used, f"{100 * GIB}\n")
    for gpu in range(8):
        node.remove(node.device(gpu, "current_memory_partition"))

    def pause(seconds: float) -> bool:
        node.write(used, "0\n")
        return True

    lines: list[str] = []
    checked = replace(subject(wait_vram=60), deployment=replace(subject().deployment, port=free_port()))
    check_machine(node.machine, checked, lines.append, pause)
    assert lines[0] == "preflight: GPU memory is in use, waiting up to 60 s for it"
    assert [line.split(": ")[1] for line in lines[1:]] == ["unknown gpu-partition"]


def test_what_is_odd_about_a_checkpoint(node: Node, tmp_path: Path) -> None:
    """It does not stop a service, and is told like any other warning."""
    make_tiny_checkpoint(tmp_path / "tiny")
    index = tmp_path / "tiny" / INDEX_NAME
    index.write_text(json.dumps({**json.loads(index.read_text()), "metadata": {"total_size": 1}}))
    lines: list[str] = []
    checked = replace(
        subject(),
        deployment=replace(subject().deployment, port=free_port()),
        checkpoint=require_servable(tmp_path / "tiny"),
    )
    check_machine(node.machine, checked, lines.append, lambda seconds: False)
    (line,) = lines
    assert line.startswith(f"preflight: warn checkpoint: {index} says total_size 1, its shards hold ")


def test_a_start_that_is_refused(node: Node) -> None:
    """The first failure, and how many others there are."""
    node.write(node.device(0, "current_compute_partition"), "CPX\n")
    node.remove("/dev/dri/renderD136")
    checked = replace(subject(), deployment=replace(subject().deployment, port=free_port()))
    with pytest.raises(OperatorError) as caught:
        check_machine(node.machine, checked, print, lambda seconds: False)
    assert str(caught.value).startswith("/dev/dri/renderD136 is not there (and 1 more check failed); docker")


def probing(node: Node, tmp_path: Path, **told: list[str]) -> Subject:
    """A start on the node with a double of AITER, whose compiler does what it is told."""
    install(node.search, Generation.SECOND).behave(**told)
    node.environment |= {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    return replace(subject(), deployment=replace(subject().deployment, port=free_port()))


def test_kernels_are_compiled_apart_from_vllm(node: Node, tmp_path: Path) -> None:
    """Once for each build of AITER: what the next start finds it does not compile again."""
    checked = probing(node, tmp_path)
    lines: list[str] = []
    check_machine(node.machine, checked, lines.append, lambda seconds: True, probe=True)
    assert "AITER compiles its int4 kernels apart from vLLM" in lines[-1]
    (kept,) = (tmp_path / "xdg/kimi-k3/kernels").iterdir()
    assert kept.name.endswith("-probe")
    install(node.search, Generation.SECOND).behave(fail=["flydsl"])
    check_machine(node.machine, checked, lines.append, lambda seconds: True, probe=True)


def test_a_compiler_that_llvm_ends_ends_the_start(node: Node, tmp_path: Path) -> None:
    """In vLLM's worker the abort would take the process, and 20 minutes, with it."""
    checked = probing(node, tmp_path, abort=["flydsl_moe2_"])
    with pytest.raises(OperatorError, match="by SIGABRT: LLVM ERROR: Cannot select"):
        check_machine(node.machine, checked, print, lambda seconds: True, probe=True)


def test_a_probe_that_is_no_longer_wanted(node: Node, tmp_path: Path) -> None:
    """A signal for the supervisor ends it within a moment, not after its ten minutes."""
    checked = probing(node, tmp_path, hang=["flydsl_moe1_"])
    lines: list[str] = []
    check_machine(node.machine, checked, lines.append, lambda seconds: False, probe=True)
    assert "compile-stage-1" in lines[-2]
    assert not list((tmp_path / "xdg/kimi-k3/kernels").rglob("*.pkl"))
