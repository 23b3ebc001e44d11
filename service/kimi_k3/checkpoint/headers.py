# SPDX-License-Identifier: Apache-2.0
"""Read the headers of safetensors files, and nothing else of them.

The format (https://github.com/huggingface/safetensors, "Format"): eight bytes with the header's length N,
little-endian; N bytes of JSON, one object that maps a tensor's name to its dtype, shape and the pair of
offsets of its data; then the data. Tensors cover the data without holes or overlaps.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from kimi_k3.checkpoint.messages import bad_checkpoint
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import NotRegularFile, open_regular
from kimi_k3.words.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Bits per element of every dtype of the format (safetensors' ``Dtype`` enumeration).
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
#: Bytes of the length field in front of the header.
LENGTH_BYTES = 8
#: Offsets and sizes are 64-bit numbers.
_COUNT_MAX = (1 << 63) - 1
#: Bytes; the reference implementation refuses longer headers (``MAX_HEADER_SIZE``).
MAX_HEADER_BYTES = 100_000_000

#: (start, nbytes) of an entry: an empty tensor shares its start with its neighbour and must come first.
_PLACE = itemgetter(3, 4)

_REMEDY = "download that file again"


class TruncatedShard(OperatorError):
    """A file that ends before its own header says it does."""


class TensorEntry(NamedTuple):
    """One tensor of a header.

    Attributes:
        name: its full name.
        dtype: a key of :data:`DTYPE_BITS`.
        shape: elements per axis.
        start: offset of its first byte, counted from the end of the header.
        nbytes: bytes of its data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What the header of one safetensors file says.

    Attributes:
        tensors: in the order of their data.
        header_bytes: length of the JSON, padding included.
        data_bytes: length of the data that must follow it.
    """

    tensors: tuple[TensorEntry, ...]
    header_bytes: int
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        """The size the complete file has."""
        return LENGTH_BYTES + self.header_bytes + self.data_bytes


def _damaged(where: str, why: str) -> OperatorError:
    return bad_checkpoint(f"{where} is not a valid safetensors file ({why})", _REMEDY)


def truncated(where: str, size: int, needed: int) -> TruncatedShard:
    """The error for a file of ``size`` bytes that must have at least ``needed``."""
    return TruncatedShard(
        printable(f"{where} is truncated ({size:,} of at least {needed:,} bytes)"),
        remedy=_REMEDY,
        exit_code=ExitCode.BAD_CHECKPOINT,
    )


class _Entry(msgspec.Struct, gc=False):
    """One tensor as a header writes it."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], int]


# The entries of a header are taken apart one by one, since one of them may be ``__metadata__``.
_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)
_METADATA = msgspec.json.Decoder(dict[str, str] | None)


@functools.lru_cache(maxsize=1024)
def _size(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor; None if there is no such dtype or shape.

    Remembered: the published checkpoint has half a million tensors but some fifty different shapes.
    """
    nbytes, rest = divmod(math.prod(shape) * DTYPE_BITS.get(dtype, 0), 8)
    return None if dtype not in DTYPE_BITS or rest or max(nbytes, *shape, 0) > _COUNT_MAX else nbytes


def _entries(found: dict[str, msgspec.Raw], where: str) -> Iterator[TensorEntry]:
    """The checked entries of a header, in its own order."""
    decode = _ENTRY.decode
    for name, raw in found.items():
        try:
            entry = decode(raw)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise _damaged(where, f"tensor {name!r:.200}: {error}") from None
        start, end = entry.data_offsets
        size = _size(entry.dtype, entry.shape)
        if size is None:
            raise _damaged(where, f"tensor {name!r:.200} of dtype {entry.dtype!r:.50} cannot have its shape")
        if end - start != size or start > _COUNT_MAX:
            raise _damaged(where, f"tensor {name!r:.200} does not span the {size} bytes its shape needs")
        yield TensorEntry(name, entry.dtype, entry.shape, start, size)


def parse_header(raw: bytes, *, where: str) -> ShardHeader:
    """Parse the JSON part of a header.

    Args:
        raw: the N bytes after the length field.
        where: the file's path, for messages.

    Raises:
        OperatorError: not JSON, a malformed entry or ``__metadata__``, or data with holes or overlaps.
    """
    try:
        found = _HEADER.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _damaged(where, f"its header is not a JSON object: {error}") from None
    try:
        _METADATA.decode(found.pop("__metadata__", b"null"))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _damaged(where, f"its __metadata__ is not an object of strings: {error}") from None
    tensors = tuple(sorted(_entries(found, where), key=_PLACE))
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            raise _damaged(where, f"tensor {tensor.name!r:.200} starts at {tensor.start}, expected {end}")
        end += tensor.nbytes
    return ShardHeader(tensors=tensors, header_bytes=len(raw), data_bytes=end)


def read_header(path: Path, *, size: int) -> ShardHeader:
    """Read the header of ``path`` without comparing the data behind it with the file's ``size``.

    Raises:
        TruncatedShard: the file ends inside its header.
        OperatorError: unreadable, no regular file, or anything :func:`parse_header` refuses.
    """
    where = str(path)
    try:
        with open_regular(path) as file:
            if size < LENGTH_BYTES:
                raise truncated(where, size, LENGTH_BYTES)
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                raise _damaged(where, f"its header would have {length:,} bytes")
            if size < LENGTH_BYTES + length:
                raise truncated(where, size, LENGTH_BYTES + length)
            raw = file.read(length)
    except NotRegularFile as error:
        raise _damaged(where, str(error.strerror)) from None
    except OSError as error:
        raise bad_checkpoint(
            f"{where} cannot be read ({error.strerror})", "check its permissions and the file system"
        ) from None
    if len(raw) < length:
        raise truncated(where, LENGTH_BYTES + len(raw), LENGTH_BYTES + length)
    return parse_header(raw, where=where)


def read_shard(path: Path) -> ShardHeader:
    """Read the header of ``path`` and check that the file is as long as it says.

    Raises:
        TruncatedShard: the file is shorter than its header or than its last tensor.
        OperatorError: missing, unreadable, malformed, or longer than its header says.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise bad_checkpoint(f"{path} cannot be read ({error.strerror})", _REMEDY) from None
    header = read_header(path, size=size)
    if size < header.file_bytes:
        raise truncated(str(path), size, header.file_bytes)
    if size > header.file_bytes:
        raise _damaged(str(path), f"{size - header.file_bytes:,} bytes follow its last tensor")
    return header
