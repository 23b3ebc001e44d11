# SPDX-License-Identifier: Apache-2.0
"""Logs as rotation and operators leave them: compressed, cut off, or no text at all."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.diagnosis.unpack import PIECE_BYTES, Damaged, NotText, as_text

TEXT = b"".join(b"(APIServer pid=1) INFO 10-20 12:00:00 [x.py:%d] well\n" % at for at in range(20_000))
KINDS = [gzip.compress, bz2.compress, lzma.compress]


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("compress", KINDS)
@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_compressed_text_is_unpacked(compress: Callable[[bytes], bytes], size: int) -> None:
    """Whatever a pipe makes of it; several parts after each other are one log, as for zcat."""
    data = compress(TEXT) + compress(b"next\n") + b"\0" * 512
    assert b"".join(as_text(pieces(data, size))) == TEXT + b"next\n"


@pytest.mark.parametrize("compress", KINDS)
def test_what_is_cut_off_is_read_so_far(compress: Callable[[bytes], bytes]) -> None:
    """A copy of a log that is still being written ends anywhere."""
    noise = random.Random(1).randbytes(1_000_000).hex().encode()
    got: list[bytes] = []
    with pytest.raises(Damaged, match="ends early"):
        got.extend(as_text([compress(noise)[:-300_000]]))
    assert got
    assert noise.startswith(b"".join(got))


@pytest.mark.parametrize("compress", KINDS)
def test_what_is_damaged_says_so(compress: Callable[[bytes], bytes]) -> None:
    """Instead of a traceback."""
    data = bytearray(compress(random.Random(1).randbytes(100_000).hex().encode()))
    data[len(data) // 2 :] = os.urandom(len(data) // 2)
    with pytest.raises(Damaged, match="is damaged"):
        list(as_text([bytes(data)]))


@pytest.mark.parametrize("compress", KINDS)
def test_a_bomb_does_not_fill_the_memory(compress: Callable[[bytes], bytes]) -> None:
    """A thousand times its size, on a node whose memory the engine needs; xz has a dictionary of 8 MiB."""
    data = compress(b"x" * 99 + b"\n" + b"y" * 200_000_000)
    tracemalloc.start()
    try:
        size = sum(len(piece) for piece in as_text([data]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 200_000_100
    assert peak < (8 << 20) + 8 * PIECE_BYTES + 2 * len(data)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x28\xb5\x2f\xfd" + bytes(100), "compressed with zstd"),
        (b"PK\x03\x04" + bytes(100), "compressed with zip"),
        (b"\x04\x22\x4d\x18" + bytes(100), "compressed with lz4"),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\0\x3e\0\x01", "not text"),
        (random.Random(2).randbytes(10_000), "not text"),
        (gzip.compress(gzip.compress(TEXT)), "not text"),
    ],
)
def test_what_is_no_text_is_named(data: bytes, what: str) -> None:
    """'No known failure in 2 lines' would be the truth, and of no use."""
    with pytest.raises(NotText, match=what):
        list(as_text([data]))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0" * 10_000,
        b"\xff\0" * 1000,
        TEXT,
        b"\x1b[0;36m 50%\r 51%\x08\x08\r\n",
        "\u2584\u2580\u2588 version 0.32.0, caf\u00e9".encode("utf-16-le"),
        "\u2584\u2580\u2588 caf\u00e9".encode("latin-1", "replace"),
    ],
)
def test_text_stays_text(text: bytes) -> None:
    """Colours, progress bars, other encodings and files cut while they were written are read as ever."""
    assert b"".join(as_text(pieces(text, 7))) == text


@settings(deadline=None)
@given(st.sampled_from([b"\x1f\x8b\x08", b"BZh91AY&SY", b"\xfd7zXZ\0", b""]), st.binary(max_size=200))
def test_any_bytes_end_in_an_answer(magic: bytes, rest: bytes) -> None:
    """Text, or an error of ours."""
    with contextlib.suppress(NotText, Damaged):
        assert b"".join(as_text([magic + rest])) or not rest
