# SPDX-License-Identifier: Apache-2.0
"""A log as text, compressed or not: recognised by its first bytes, unpacked in bounded memory."""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Protocol

PIECE_BYTES = 256 * 1024
"""At most so much is unpacked at a time."""

XZ_MEMORY = 256 * 1024 * 1024
"""What ``xz -9`` wrote needs 65 MiB; a hostile header can ask for 4 GiB."""

_HEAD = 4096
_TEXT = bytes({*range(7, 14), 27, *range(32, 127), *range(128, 256)})
_ELSEWHERE = (
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "zip"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip"),
    (b"\x1f\x9d", "compress"),
    (b"LZIP\x01", "lzip"),
)


class NotText(ValueError):
    """What it is instead; ``remedy`` says what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class Damaged(ValueError):
    """What comes next cannot be unpacked; what came before was whole."""


class _Unpacker(Protocol):
    """As :mod:`bz2` and :mod:`lzma` have it."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """One member of a gzip file, with the interface of the others."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)
        self._full = False

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._full and not self._stream.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        out = self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
        self._full = len(out) == max_length
        return out


_KINDS: tuple[tuple[str, re.Pattern[bytes], Callable[[], _Unpacker]], ...] = (
    ("gzip", re.compile(rb"\x1f\x8b\x08"), _Gzip),
    ("bzip2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.BZ2Decompressor),
    ("xz", re.compile(rb"\xfd7zXZ\0"), lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)),
)


def as_text(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of a log in pieces of any size; those of a compressed one unpacked.

    Raises:
        NotText: the first bytes are of something else.
        Damaged: the compressed data is cut off or not whole.
    """
    head, chunks = _peeked(chunks)
    for magic, name in _ELSEWHERE:
        if head.startswith(magic):
            raise NotText(f"it is compressed with {name}", "decompress it first")
    for name, magic_of, new in _KINDS:
        if magic_of.match(head):
            head, chunks = _peeked(_unpacked(chunks, new, name))
            break
    # A file that was cut while it was written, and another encoding, hold zeros.
    seen = head.replace(b"\0", b"")
    if len(seen.translate(None, _TEXT)) * 32 > len(seen):
        raise NotText("it is not text", "give what vLLM printed")
    yield from chunks


def _peeked(chunks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, as many as tell what it is, and all of them; a pipe may give one at a time."""
    rest = iter(chunks)
    head = b""
    while len(head) < _HEAD and (chunk := next(rest, b"")):
        head += chunk
    return head, chain((head,), rest)


def _unpacked(chunks: Iterable[bytes], new: Callable[[], _Unpacker], name: str) -> Iterator[bytes]:
    unpacker, whole = new(), False
    for chunk in chunks:
        data = chunk
        # Several members may follow each other, and zeros the last.
        while data := data.lstrip(b"\0") if whole else data:
            whole = False
            try:
                piece = unpacker.decompress(data, PIECE_BYTES)
                while piece:
                    yield piece
                    piece = (
                        b"" if unpacker.needs_input or unpacker.eof else unpacker.decompress(b"", PIECE_BYTES)
                    )
            except (zlib.error, OSError, lzma.LZMAError) as error:
                raise Damaged(f"the {name} data is damaged: {error}") from None
            data = b""
            if unpacker.eof:
                data, unpacker, whole = unpacker.unused_data, new(), True
    if not whole:
        raise Damaged(f"the {name} data ends early")
