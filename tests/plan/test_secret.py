# SPDX-License-Identifier: Apache-2.0
"""The API key's sources and what they may hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.secret import read_api_key
from kimi_k3.words.secret import MAX_FILE_BYTES


def test_the_file_wins_over_the_environment(tmp_path: Path) -> None:
    """What is given for one start is more explicit than what a shell happens to carry."""
    file = tmp_path / "key"
    file.write_text("  from-file \n")
    assert read_api_key(file, {"KIMI_K3_API_KEY": "from-environment"}) == "from-file"
    assert read_api_key(None, {"KIMI_K3_API_KEY": "from-environment"}) == "from-environment"
    assert read_api_key(None, {}) is None


@pytest.mark.parametrize("text", ["", " \n", "one\ntwo", "two words", "schl\u00fcssel", "tab\tbed", "\x00"])
def test_a_key_no_header_can_carry_is_refused_unseen(tmp_path: Path, text: str) -> None:
    """An empty key would serve without authentication; the text must not show what was in the file."""
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(OperatorError) as caught:
        read_api_key(file, {})
    assert caught.value.exit_code is ExitCode.USAGE
    assert str(file) in str(caught.value)
    if text.strip():
        assert text.strip() not in str(caught.value)
    with pytest.raises(OperatorError, match="KIMI_K3_API_KEY"):
        read_api_key(None, {"KIMI_K3_API_KEY": text})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """No traceback for a path with a typing error, nor for a binary file."""
    with pytest.raises(OperatorError, match="No such file"):
        read_api_key(tmp_path / "none", {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(OperatorError, match="is not text"):
        read_api_key(tmp_path / "binary", {})


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a directory", "larger than"])
def test_a_file_that_never_ends_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """Opening a FIFO waits for a writer, and /dev/zero fills the memory; both happened."""
    file = tmp_path / "file"
    if kind == "a FIFO":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    elif kind == "a directory":
        file.mkdir()
    else:
        file.write_bytes(b"k" * (MAX_FILE_BYTES + 1))
    with pytest.raises(OperatorError, match=kind) as caught:
        read_api_key(file, {})
    assert caught.value.exit_code is ExitCode.USAGE
    assert "KIMI_K3_API_KEY" in str(caught.value)


def test_vllms_own_variable_is_refused() -> None:
    """With it alone the engine would ask for a key that the canary does not send."""
    with pytest.raises(OperatorError) as caught:
        read_api_key(None, {"VLLM_API_KEY": "secret-key"})
    assert "KIMI_K3_API_KEY" in str(caught.value)
    assert "secret-key" not in str(caught.value)
