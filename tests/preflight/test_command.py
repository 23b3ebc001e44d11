# SPDX-License-Identifier: Apache-2.0
"""The whole preflight on made-up machines: its verdict, its document, its lines, its exit code."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.options import Options
from kimi_k3.plan.startable import require_startable
from kimi_k3.preflight import command
from kimi_k3.preflight.checks import of_start
from kimi_k3.preflight.command import Request, run_preflight
from kimi_k3.preflight.finding import Finding, Report, State, failed, overall, passed, unknown, warned
from kimi_k3.profiles.load import load_profile

from .node import GIB, Node, subject

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def node(node: Node) -> Node:
    """The node with the vLLM that is installed here."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (node.search / "vllm").symlink_to(spec.submodule_search_locations[0])
    return node


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny_checkpoint(directory)
    return directory


def request(
    profile: str = "ep8", *, checkpoint: Path | None = None, accept_lossy: bool = True, image: bool = False
) -> Request:
    return Request(
        options=Options(
            checkpoint=checkpoint or Path("CHECKPOINT"),
            host="127.0.0.1",
            port=8000,
            served_model_name="kimi-k3",
            accept_lossy=accept_lossy,
        ),
        with_checkpoint=checkpoint is not None,
        profile=profile,
        state_dir=None,
        listen=False,
        image=image,
        probe_compile=False,
        wait_vram=None,
        as_json=True,
    )


def report(node: Node, asked: Request, capsys: pytest.CaptureFixture[str]) -> tuple[int, Report]:
    code = run_preflight(asked, node.machine)
    return code, Report.model_validate(json.loads(capsys.readouterr().out))


def states(found: Report) -> dict[str, State]:
    return {finding.check: finding.state for finding in found.findings}


def test_a_healthy_node(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything passes and the exit code is 0, so that a script can rely on it."""
    code, found = report(node, request(), capsys)
    assert [finding for finding in found.findings if finding.state is not State.PASS] == []
    assert (code, found.state, found.schema_version, found.checkpoint) == (0, State.PASS, 1, None)
    assert {"gpu-access", "gpu-memory-free", "aiter-version", "vllm-contract", "limit-stack"} <= set(
        states(found)
    )
    assert not {"checkpoint", "port", "compile-stage-1"} & set(states(found))


def test_a_warning_and_a_failure(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and 2; what is unknown counts as a warning."""
    for gpu in range(8):
        node.remove(node.device(gpu, "current_memory_partition"))
    code, found = report(node, request(), capsys)
    assert (code, found.state, states(found)["gpu-partition"]) == (1, State.WARN, State.UNKNOWN)
    code, found = report(node, request(accept_lossy=False), capsys)
    assert (code, found.state, states(found)["consent"]) == (2, State.FAIL, State.FAIL)


def test_no_gpu_checks_on_a_cpu(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """They were not made, so they are not listed, not even as passed."""
    _, found = report(node, request("cpu-tiny"), capsys)
    assert not [name for name in states(found) if name.startswith(("gpu-", "aiter", "limit-", "flydsl"))]


def test_what_emulation_needs(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """Without amd-quark vLLM says "No MXFP4 MoE backend supports the deployment", a minute into a start."""
    _, found = report(node, request("mxfp4-emulation", accept_lossy=False), capsys)
    assert states(found)["amd-quark"] is State.FAIL
    node.write("/site/quark/__init__.py", "")
    _, found = report(node, request("mxfp4-emulation", accept_lossy=False), capsys)
    assert states(found)["amd-quark"] is State.PASS
    assert "amd-quark" not in states(report(node, request(), capsys)[1])


def test_no_driver(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """One finding for what is missing, none for all that follows from it."""
    node.remove("/dev/kfd")
    code, found = report(node, request(), capsys)
    assert code == 2
    assert {name: state for name, state in states(found).items() if name.startswith("gpu-")} == {
        "gpu-driver": State.FAIL
    }


def test_an_image(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that a machine without GPUs and a checkpoint cannot know."""
    for name in ("/dev", "/sys", "/proc/self/limits"):
        node.remove(name)
    code, found = report(node, request(image=True), capsys)
    assert code == 0
    assert {name.split("-")[0] for name in states(found)} == {"profile", "vllm", "aiter", "flydsl", "cache"}


def test_a_checkpoint(node: Node, capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    """Whole; without a shard; with an unfinished download; not there at all."""
    _, found = report(node, request("cpu-tiny", checkpoint=tiny), capsys)
    assert states(found)["checkpoint"] is State.PASS
    assert states(found)["plan"] is State.PASS
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    next(iter(sorted(broken.glob("*.safetensors")))).rename(broken / "shard.incomplete")
    code, found = report(node, request("cpu-tiny", checkpoint=broken), capsys)
    whats = [finding.what for finding in found.findings if finding.check == "checkpoint"]
    assert code == 2
    assert any("lacks 1 of" in what for what in whats)
    assert any("unfinished downloads" in what for what in whats)
    _, found = report(node, request("cpu-tiny", checkpoint=tmp_path / "none"), capsys)
    assert any("does not exist" in finding.what for finding in found.findings)


def test_a_checkpoint_that_the_profile_cannot_cut(
    node: Node, capsys: pytest.CaptureFixture[str], tiny: Path
) -> None:
    """Too few positions for the profile; the other checks are still made."""
    code, found = report(node, request(checkpoint=tiny), capsys)
    assert code == 2
    assert states(found)["plan"] is State.FAIL
    assert states(found)["gpu-count"] is State.PASS


@pytest.mark.parametrize("profile", ["ep8-dspark"])
def test_a_profile_that_no_start_takes(node: Node, capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """In the words of the start that would refuse it."""
    with pytest.raises(OperatorError) as refused:
        require_startable(load_profile(profile))
    code, found = report(node, request(profile), capsys)
    (finding,) = [finding for finding in found.findings if finding.check == "profile"]
    assert (code, finding.state) == (2, State.FAIL)
    assert f"{finding.what}; {finding.remedy}" == str(refused.value)


def test_a_state_directory(
    node: Node, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the command line, of the environment, or that there is none, is a finding and not an error."""
    node.write("/file", "")
    for state_dir, variable in ((Path("/file"), "/fine"), (None, "/file")):
        monkeypatch.setenv("KIMI_K3_STATE_DIR", variable)
        code, found = report(node, replace(request(), state_dir=state_dir), capsys)
        assert (code, states(found)["state-directory"]) == (2, State.FAIL)

    def nowhere() -> Path:
        raise OperatorError("user 7 has no home directory", remedy="make one", exit_code=ExitCode.STATE)

    monkeypatch.setattr(command, "default_state_dir", nowhere)
    code, found = report(node, request(), capsys)
    assert (code, states(found)["state-directory"]) == (2, State.FAIL)


def test_a_port_that_is_asked_for(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """Only then: beside a service that runs, its own port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        options = replace(request().options, port=other.getsockname()[1])
        code, found = report(node, replace(request(), options=options, listen=True), capsys)
    assert (code, states(found)["port"]) == (2, State.FAIL)


def test_what_the_operator_sets(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """A start with more memory for itself leaves others less, and that is what is checked."""
    node.write(node.device(0, "mem_info_vram_used"), f"{10 * GIB}\n")
    asked = request()
    for settings, state in (((), State.PASS), (("gpu-memory-utilization=0.97",), State.FAIL)):
        changed = replace(asked, options=replace(asked.options, settings=settings))
        _, found = report(node, changed, capsys)
        assert states(found)["gpu-memory-free"] is state


def test_lines_for_people(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, the worst last, and a summary that counts."""
    node.write(node.device(0, "mem_info_vram_used"), f"{100 * GIB}\n")
    node.environment["VLLM_ENGINE_CORE_INIT_TIMEOUT"] = "1\nfail forged: line \x1b[2J"
    assert run_preflight(replace(request(), as_json=False), node.machine) == 2
    lines = capsys.readouterr().out.splitlines()
    words = [line.split()[0] for line in lines[:-1]]
    assert words == sorted(words, key=["pass", "unknown", "warn", "fail"].index)
    assert lines[-2].startswith("fail    gpu-memory-free: ")
    assert lines[-1].startswith("preflight of profile ep8: 1 fail, 1 warn, ")
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (replace(request(image=True), with_checkpoint=True), "CHECKPOINT with --image"),
        (replace(request(image=True), wait_vram=5.0), "--wait-vram with --image"),
        (replace(request(image=True), listen=True), "--port with --image"),
        (replace(request(image=True), state_dir=Path("/x")), "--state-dir with --image"),
        (replace(request(), wait_vram=-1.0), "--wait-vram -1.0"),
        (replace(request(), wait_vram=float("nan")), "--wait-vram nan"),
        (replace(request("cpu-tiny"), wait_vram=1.0), "has no effect with profile cpu-tiny"),
        (replace(request("cpu-tiny"), probe_compile=True), "--probe-compile: profile cpu-tiny"),
        (request("ep9"), "did you mean"),
    ],
)
def test_a_request_without_sense(node: Node, asked: Request, part: str) -> None:
    """What would have no effect is refused."""
    with pytest.raises(OperatorError, match=part) as caught:
        run_preflight(asked, node.machine)
    assert caught.value.exit_code is ExitCode.USAGE


def test_nobody_waits_for_gpus_that_will_not_be_used(node: Node) -> None:
    """With another failure the start is refused at once."""
    node.write(node.device(0, "mem_info_vram_used"), f"{100 * GIB}\n")
    node.environment["VLLM_PORT"] = "tcp://10.0.0.1:1"

    def never(seconds: float) -> bool:
        raise AssertionError("waited")

    node.pause = never
    found = {f.check: f for f in of_start(node.machine, subject(wait_vram=60), listen=False)}
    assert found["gpu-memory-free"].state is State.FAIL
    assert found["environment-service-link"].state is State.FAIL


def test_the_state_of_all() -> None:
    """The worst counts, and not knowing is never good."""
    fine, odd = passed("a", "x"), unknown("b", "x", "y")
    assert overall([fine]) is State.PASS
    assert overall([fine, odd]) is State.WARN
    assert overall([fine, odd, failed("c", "x", "y")]) is State.FAIL
    assert overall([warned("d", "x", "y")]) is State.WARN


@pytest.mark.parametrize(
    ("state", "remedy"), [(State.PASS, "do it"), (State.FAIL, None), (State.UNKNOWN, None)]
)
def test_a_finding_without_a_remedy(state: State, remedy: str | None) -> None:
    """Whoever writes a check cannot forget what the operator is to do."""
    with pytest.raises(ValueError, match="remedy"):
        Finding(check="a", state=state, what="x", remedy=remedy)


def test_a_refusal() -> None:
    """The first failure in one line, and how many more there are."""
    error = failed("a", "x is wrong", "mend it", ExitCode.IN_USE).refusal(2)
    assert str(error) == "x is wrong (and 2 more checks failed); mend it"
    assert error.exit_code is ExitCode.IN_USE
