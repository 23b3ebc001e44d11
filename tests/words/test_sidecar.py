# SPDX-License-Identifier: Apache-2.0
"""Where the sidecar is, and what opens it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.sidecar import read_token, sidecar_url

TOKEN = "s3cret-t0ken"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("http://127.0.0.1:8001/", "http://127.0.0.1:8001"),
        ("127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("node-7", "http://node-7"),
        ("https://k3.example/sidecar/", "https://k3.example/sidecar"),
        ("[::1]:8001", "http://[::1]:8001"),
    ],
)
def test_urls(given: str, url: str) -> None:
    """What an operator types for an address is one, also behind a path of a proxy."""
    assert sidecar_url(given) == url


@pytest.mark.parametrize(
    "given",
    [
        "",
        "ftp://x",
        "http://",
        "x:port",
        "x:99999",
        "http://[",
        "x y",
        "x?a=b",
        "x#y",
        "x\x1b[2J",
        "http://é",
    ],
)
def test_no_urls(given: str) -> None:
    """One line, with an example, and nothing of it can command the terminal."""
    with pytest.raises(OperatorError) as caught:
        sidecar_url(given)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "http://127.0.0.1:8001" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_password_in_the_url_is_not_shown() -> None:
    """The URL stands in the headline and in scripts' logs."""
    with pytest.raises(OperatorError) as caught:
        sidecar_url(f"http://me:{TOKEN}@x:1")
    assert TOKEN not in str(caught.value)
    assert "--token-file" in str(caught.value)


def test_where_a_token_comes_from(tmp_path: Path) -> None:
    """The flag before the file's variable, that before the other; without any there is none."""
    flagged, named = tmp_path / "flagged", tmp_path / "named"
    flagged.write_text("flagged\n")
    named.write_text("named")
    environment = {"KIMI_K3_SIDECAR_TOKEN_FILE": str(named), "KIMI_K3_SIDECAR_TOKEN": TOKEN}
    assert read_token(flagged, environment) == "flagged"
    assert read_token(None, environment) == "named"
    assert read_token(None, {"KIMI_K3_SIDECAR_TOKEN": TOKEN}) == TOKEN
    assert read_token(None, {"KIMI_K3_SIDECAR_TOKEN": ""}) is None


@pytest.mark.parametrize("text", ["", " \n", f"{TOKEN}\nsecond", f"{TOKEN} x", f"{TOKEN}\x00", f"{TOKEN}é"])
def test_no_token(tmp_path: Path, text: str) -> None:
    """A file that holds something else is named and never quoted."""
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(OperatorError) as caught:
        read_token(file, {})
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(file) in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    """A secret that was not mounted is a mistake, not "no token"."""
    for file in (tmp_path / "none", tmp_path):
        with pytest.raises(OperatorError) as caught:
            read_token(None, {"KIMI_K3_SIDECAR_TOKEN_FILE": str(file)})
        assert "KIMI_K3_SIDECAR_TOKEN_FILE" in str(caught.value)
