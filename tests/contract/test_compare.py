# SPDX-License-Identifier: Apache-2.0
"""The recorded contracts against the real source of both versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3.contract.compare import compare, nearest
from kimi_k3.contract.facts import RELIANCES, Use, relied_on
from kimi_k3.contract.record import contracts, is_release, release
from kimi_k3.contract.write import main, text, written
from tests.wheels import VERSIONS, vllm_source

ALL = frozenset(Use)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_record_is_what_the_wheel_holds(version: str) -> None:
    """Written anew from the wheel it is the same file, letter for letter."""
    (recorded,) = [contract for contract in contracts() if contract.version == version]
    found = written(vllm_source(version))
    assert found == recorded
    here = Path(__file__).parents[2] / "service/kimi_k3/contract/data" / f"vllm-{version}.json"
    assert text(found) == here.read_text(encoding="utf-8")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_is_as_recorded(version: str) -> None:
    """For every use there is."""
    found = compare(vllm_source(version), version, ALL)
    assert found.as_recorded
    assert found.facts == len(RELIANCES)
    assert found.difference() == f"all {len(RELIANCES)} facts are as in {version}"


def test_the_build_for_cpus_is_as_recorded() -> None:
    """It is another distribution with the same source."""
    found = subprocess.run(
        [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('vllm').origin)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert compare(Path(found.strip()).parent, "0.32.0+cpu", {Use.CPU, Use.INT4}).as_recorded


def test_a_newer_version_is_told_what_differs() -> None:
    """As 0.33.0 would be if only 0.32.0 were known: compared with the last one before it."""
    found = compare(vllm_source("0.33.0"), "0.32.1", ALL)
    assert not found.known
    assert found.nearest == "0.32.0"
    assert not found.missing
    assert "replace_parameter in model_executor/utils.py takes (layer, param_name, new_tensor) and not" in (
        found.difference()
    )


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", "0.32.0"),
        ("0.32.9", "0.32.0"),
        ("0.33.0+cu129", "0.33.0"),
        ("1.0.0", "0.33.0"),
        ("0.9.2", "0.32.0"),
        ("dev", "0.33.0"),
        (None, "0.33.0"),
    ],
)
def test_nearest(version: str | None, expected: str) -> None:
    """Versions grow, so the last one before it is the most alike."""
    assert nearest(version).version == expected


@pytest.mark.parametrize(
    ("version", "numbers", "whole"),
    [
        ("0.32.0", (0, 32, 0), True),
        ("0.33.0+rocm722", (0, 33, 0), True),
        ("v0.33", (0, 33, 0), True),
        ("0.33.0rc1", (0, 33, 0), False),
        ("0.33.0.post1", (0, 33, 0), False),
        ("0.33.1.dev3+gabc", (0, 33, 1), False),
        ("0.1.dev19253+g5f76ae224", (0, 1, 0), False),
        ("dev", None, False),
    ],
)
def test_versions(version: str, numbers: tuple[int, int, int] | None, whole: bool) -> None:
    """A build's suffix is no other version; a pre-release is."""
    assert release(version) == numbers
    assert is_release(version) is whole


def test_uses() -> None:
    """What only int4 on gfx942 needs does not keep a CPU from serving, and the other way round."""
    assert relied_on(frozenset()) != ()
    for uses in ({Use.CPU}, {Use.GFX942}, {Use.CPU, Use.INT4}, {Use.GFX942, Use.INT4}):
        names = {(fact.file, fact.name) for fact in relied_on(frozenset(uses))}
        assert ("_aiter_ops.py", "rocm_aiter_ops.fused_moe") in names or uses != {Use.GFX942, Use.INT4}
        assert ("v1/worker/cpu_model_runner.py", "CPUModelRunner._zero_block_ids") not in names or (
            Use.CPU in uses
        )


def test_every_name_is_listed_once() -> None:
    """The record is by name: a second entry would hide the first."""
    names = [(fact.file, fact.name) for fact in RELIANCES]
    assert len(set(names)) == len(names)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It writes what is recorded, and refuses what is no vLLM or lacks what the plugin needs."""
    package = vllm_source("0.33.0")
    assert main([str(package), str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["version"] == "0.33.0"
    assert main([]) == 2
    assert main([str(tmp_path)]) == 1
    (tmp_path / "_version.py").write_text("__version__ = '0.34.0'")
    assert main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "its version is None, which is no release" in error
    assert "mxfp4.py cannot be read (No such file or directory): the plugin's method extends it" in error
