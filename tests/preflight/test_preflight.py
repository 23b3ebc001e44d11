# SPDX-License-Identifier: Apache-2.0
"""Each check of this machine, passing and failing."""

from __future__ import annotations

import json
import socket
from importlib import metadata
from pathlib import Path

import pytest

from kimi_k3.checkpoint import inspect_checkpoint, make_tiny_checkpoint
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.preflight import engine
from kimi_k3.preflight.checkpoint import check_code
from kimi_k3.preflight.checks import TRUST
from kimi_k3.preflight.cores import check_cores
from kimi_k3.preflight.device import check_device, usual_profile
from kimi_k3.preflight.finding import State
from kimi_k3.preflight.network import check_port_free
from kimi_k3.preflight.state import check_state_dir
from kimi_k3.profiles.load import load_profile, profile_names


def test_a_state_directory_is_created(tmp_path: Path) -> None:
    """The first start on a machine needs no preparation, and the probe leaves nothing."""
    check_state_dir(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_state_directory_below_a_file(tmp_path: Path) -> None:
    """Named with the reason; root, too, cannot create it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError, match="Not a directory") as caught:
        check_state_dir(tmp_path / "file" / "state")
    assert caught.value.exit_code is ExitCode.STATE


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken(host: str) -> None:
    """Taken on one address is taken for all of them."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OperatorError, match=f"--port {port}") as caught:
            check_port_free(host, port)
    assert caught.value.exit_code is ExitCode.IN_USE
    check_port_free(host, port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_ours(host: str) -> None:
    """A name nobody knows, and an address of another machine (RFC 5737)."""
    with pytest.raises(OperatorError, match=host) as caught:
        check_port_free(host, 8000)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize("host", ["..", "a" * 300, "h\udcff"])
def test_a_host_that_no_name_can_be(host: str) -> None:
    """Python refuses to encode it before it asks anybody, with an error of another kind."""
    with pytest.raises(OperatorError, match="is not an address") as caught:
        check_port_free(host, 8000)
    assert caught.value.exit_code is ExitCode.USAGE


def test_the_plugin_is_declared_by_this_distribution() -> None:
    """Without the entry point vLLM would serve without converting and without a word."""
    engine.check_plugin_visible()


def test_the_plugin_is_not_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the package is only on PYTHONPATH."""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    with pytest.raises(OperatorError, match=r"vllm\.general_plugins"):
        engine.check_plugin_visible()


@pytest.mark.parametrize("allowed", [None, "kimi_k3", "other,kimi_k3"])
def test_plugins_that_include_ours(allowed: str | None) -> None:
    """Unset means all of them."""
    engine.check_plugin_allowed({} if allowed is None else {"VLLM_PLUGINS": allowed})


@pytest.mark.parametrize("allowed", ["", "other", "kimi_k3_old"])
def test_plugins_that_exclude_ours(allowed: str) -> None:
    """vLLM leaves it out silently; an empty list allows none."""
    with pytest.raises(OperatorError, match="VLLM_PLUGINS"):
        engine.check_plugin_allowed({"VLLM_PLUGINS": allowed})


@pytest.mark.parametrize("name", ["vllm/__init__.py", "datasets.py", "types.py"])
def test_a_file_in_place_of_a_module(tmp_path: Path, name: str) -> None:
    """Who starts in a clone of vLLM, or beside a script of their own, gets a traceback from within vLLM."""
    for harmless in ("vllm/README.md", "torch.txt", "test.py", "sitecustomise.py"):
        (tmp_path / harmless).parent.mkdir(exist_ok=True)
        (tmp_path / harmless).touch()
    engine.check_directory(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(OperatorError, match=f"^{name} of the current directory would be imported"):
        engine.check_directory(tmp_path)


def test_gpus_that_are_not_there(tmp_path: Path) -> None:
    """vLLM would start on the CPU, with flags that are for GPUs, and fail somewhere else."""
    with pytest.raises(OperatorError, match="--profile ep8: runs on AMD GPUs, and there is no") as caught:
        check_device(load_profile("ep8"), kfd=tmp_path / "kfd")
    assert "\n" not in str(caught.value)
    (tmp_path / "kfd").touch()
    check_device(load_profile("ep8"), kfd=tmp_path / "kfd")
    check_device(load_profile("cpu-tiny"), kfd=tmp_path / "none")


def test_the_profile_of_a_machine(tmp_path: Path) -> None:
    """One for all commands that are about this machine: where there are GPUs, they are what is meant."""
    assert usual_profile(kfd=tmp_path / "kfd") == "cpu-tiny"
    assert usual_profile(image=True, kfd=tmp_path / "kfd") == "ep8"
    (tmp_path / "kfd").touch()
    assert usual_profile(kfd=tmp_path / "kfd") == "ep8"


def test_cores() -> None:
    """One per rank is enough, fewer are refused with the number there is."""
    check_cores({3, 4}, 2)
    with pytest.raises(OperatorError, match="may use 2"):
        check_cores({3, 4}, 3)


@pytest.mark.parametrize(
    ("allowed", "published", "state", "words"),
    [
        (True, True, State.PASS, "vLLM may run Python of the checkpoint: tokenization_kimi.py (sha256 "),
        (
            False,
            True,
            State.FAIL,
            "tokenizer_config.json need Python of the checkpoint (tokenization",
        ),
        (True, False, State.PASS, "vLLM runs no Python of the checkpoint (none there)"),
        (False, False, State.PASS, "vLLM runs no Python of the checkpoint (none there)"),
    ],
)
def test_python_in_the_checkpoint(
    tmp_path: Path, allowed: bool, published: bool, state: State, words: str
) -> None:
    """vLLM refuses it 12 s into a start, or runs it unseen."""
    make_tiny_checkpoint(tmp_path / "k3")
    if published:
        (tmp_path / "k3/tokenizer.json").rename(tmp_path / "k3/tiktoken.model")
        (tmp_path / "k3/tokenization_kimi.py").write_text("class Tokenizer: ...\n")
        path = tmp_path / "k3/tokenizer_config.json"
        config = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": "tokenization_kimi.Tokenizer"}}
        path.write_text(json.dumps(config))
    finding = check_code(inspect_checkpoint(tmp_path / "k3"), allowed=allowed)
    assert finding.state is state
    assert words in finding.what


@pytest.mark.parametrize("name", [name for name in profile_names() if name != "cpu-tiny"])
def test_profiles_for_gpus_let_the_published_tokenizer_run(name: str) -> None:
    """Without it no start of the published checkpoint gets beyond its tokenizer."""
    assert TRUST in load_profile(name).flags
