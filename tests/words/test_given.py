# SPDX-License-Identifier: Apache-2.0
"""Paths as an operator gave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.given import given_path


def test_a_path_stays_as_it_was_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is printed is what was typed; only ``~`` and, where asked, the current directory are filled in."""
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.chdir(tmp_path)
    assert given_path("--x", "a/b") == Path("a/b")
    assert given_path("--x", "a/b", absolute=True) == tmp_path / "a/b"
    assert given_path("--x", "~/b") == Path("/home/one/b")


def test_a_name_that_begins_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``./~x`` is how a shell spells it, and what the error recommends."""
    monkeypatch.chdir(tmp_path)
    assert given_path("--x", "./~no-such-user", absolute=True) == tmp_path / "~no-such-user"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "an unset shell variable may be behind it"),
        ("~no-such-user/x", "no home directory of '~no-such-user'"),
        ("/a\udcff/b", "'/a\\udcff/b': is not UTF-8"),
    ],
)
def test_a_path_that_cannot_be(text: str, part: str) -> None:
    """One line that names the flag, instead of the current directory or of a traceback later."""
    with pytest.raises(OperatorError) as caught:
        given_path("--x", text)
    assert str(caught.value).startswith("--x")
    assert part in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_home_that_is_not_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is filled in is looked at, too."""
    monkeypatch.setenv("HOME", "/home/\udcff")
    with pytest.raises(OperatorError, match="not UTF-8"):
        given_path("--x", "~/b")


def test_a_current_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody removed it under the shell."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(OperatorError, match="current directory is gone"):
        given_path("--x", "b", absolute=True)
