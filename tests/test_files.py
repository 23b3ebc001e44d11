# SPDX-License-Identifier: Apache-2.0
"""Files whose place somebody else decides."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kimi_k3.files import FileTooLarge, NotRegularFile, open_regular, read_small, write_whole


@pytest.mark.parametrize("size", [0, 1, 10])
def test_small(tmp_path: Path, size: int) -> None:
    """A file of exactly the limit is still small; a link to one is the hub's usual way."""
    (tmp_path / "x").write_bytes(bytes(size))
    (tmp_path / "link").symlink_to("x")
    assert read_small(tmp_path / "x", limit=10) == read_small(tmp_path / "link", limit=10) == bytes(size)


@pytest.mark.parametrize("size", [11, 1 << 40])
def test_too_large(tmp_path: Path, size: int) -> None:
    """What is larger is not read at all, let alone into memory."""
    with (tmp_path / "x").open("wb") as file:
        file.truncate(size)
    with pytest.raises(FileTooLarge) as caught:
        read_small(tmp_path / "x", limit=10)
    assert caught.value.strerror == "it is larger than 10 bytes"


def test_size_unknown() -> None:
    """The kernel's files say that they have no bytes; they are read, and bounded, all the same."""
    path = Path("/proc/self/status")
    assert read_small(path, limit=1 << 20).startswith(b"Name:")
    with pytest.raises(FileTooLarge):
        read_small(path, limit=10)


def test_growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log grows between the question for its size and the reading; the limit holds for what is read."""
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    real = os.fstat

    def grow(descriptor: int) -> os.stat_result:
        before = real(descriptor)
        path.write_bytes(b"abcdefgh")
        return before

    monkeypatch.setattr(os, "fstat", grow)
    assert read_small(path, limit=8) == b"abcdefgh"
    path.write_bytes(b"abc")
    with pytest.raises(FileTooLarge):
        read_small(path, limit=7)


def test_fifo(tmp_path: Path) -> None:
    """Opening one waits for a writer that never comes."""
    os.mkfifo(tmp_path / "x")
    (tmp_path / "link").symlink_to("x")
    for name in ("x", "link"):
        with pytest.raises(NotRegularFile) as caught:
            read_small(tmp_path / name, limit=10)
        assert caught.value.strerror == "it is a FIFO, not a regular file"
        assert caught.value.filename == str(tmp_path / name)


def test_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is called by its name: "Invalid argument" helps nobody."""
    # Relative, since the path of a socket may have some hundred bytes only.
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path, kind in (
            (Path("socket"), "socket"),
            (tmp_path, "directory"),
            (Path("/dev/zero"), "device"),
        ):
            with pytest.raises(NotRegularFile, match=f"it is a {kind}, not a regular file"):
                read_small(path, limit=10)


def test_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the opening the name may come to lead to a FIFO: still no wait, and no leak."""
    path = tmp_path / "x"
    path.touch()
    regular = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(Path, "stat", lambda _: regular)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(NotRegularFile):
        open_regular(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_missing(tmp_path: Path) -> None:
    """The ordinary errors stay what they are, for callers that mean something by them."""
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "x", limit=10)


def test_not_inherited(tmp_path: Path) -> None:
    """vLLM's processes must not keep our files open."""
    (tmp_path / "x").touch()
    with open_regular(tmp_path / "x") as file:
        assert not os.get_inheritable(file.fileno())


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """What was there stays where writing fails, and nothing lies beside it."""
    path = tmp_path / "kept"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "taken", b"never")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["kept", "taken"]
