# SPDX-License-Identifier: Apache-2.0
"""Read the headers of safetensors files, and nothing else of them.

The format (https://github.com/huggingface/safetensors, "Format"): eight bytes with the header's length N,
little-endian; N bytes of JSON, one object that maps a tensor's name to its dtype, shape and the pair of
offsets of its data; then the data. Tensors cover the data without holes or overlaps.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kimi_k3.checkpoint.messages import bad_checkpoint, printable
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import NotRegularFile, open_regular

if TYPE_CHECKING:
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


def _size(dtype: object, shape: tuple[object, ...]) -> int | None:
    """Bytes of a tensor; None if there is no such dtype or shape."""
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    # ``type`` and not ``isinstance``: true is no number here.
    counts = [number for number in shape if type(number) is int and 0 <= number <= _COUNT_MAX]
    if bits is None or len(counts) != len(shape):
        return None
    nbytes, rest = divmod(math.prod(counts) * bits, 8)
    return None if rest or nbytes > _COUNT_MAX else nbytes


def _entries(found: dict[str, Any], where: str) -> list[TensorEntry]:
    """The checked entries of a header, in its own order.

    Column by column: the published checkpoint has half a million entries but some fifty different shapes.
    """
    names, entries = list(found), list(found.values())
    try:
        shapes = [entry["shape"] for entry in entries]
        places = [entry["data_offsets"] for entry in entries]
        if not {*map(type, shapes), *map(type, places)} <= {list} or not {*map(len, places)} <= {2}:
            raise TypeError("shape and data_offsets are lists, the latter of two numbers")
        kinds = list(zip([entry["dtype"] for entry in entries], map(tuple, shapes), strict=True))
        sizes = {kind: _size(*kind) for kind in set(kinds)}
    except (KeyError, TypeError):
        raise _damaged(where, "a tensor lacks a proper dtype, shape or pair of data_offsets") from None
    for kind, size in sizes.items():
        if size is None:
            name = names[kinds.index(kind)]
            raise _damaged(where, f"tensor {name!r:.200} cannot be of dtype {kind[0]!r:.50} and its shape")
    starts, ends = ([place[side] for place in places] for side in (0, 1))
    if not {*map(type, starts), *map(type, ends)} <= {int}:
        raise _damaged(where, "a tensor has data_offsets that are not numbers")
    nbytes = [sizes[kind] or 0 for kind in kinds]
    for name, start, end, size in zip(names, starts, ends, nbytes, strict=True):
        if end - start != size or not 0 <= start <= _COUNT_MAX:
            raise _damaged(where, f"tensor {name!r:.200} does not span the {size} bytes its shape needs")
    return [
        TensorEntry(name, dtype, shape, start, size)
        for name, (dtype, shape), start, size in zip(names, kinds, starts, nbytes, strict=True)
    ]


def _no_number(text: str) -> object:
    raise ValueError(f"{text:.40} is no number a header may hold")


def parse_header(raw: bytes, *, where: str) -> ShardHeader:
    """Parse the JSON part of a header.

    Args:
        raw: the N bytes after the length field.
        where: the file's path, for messages.

    Raises:
        OperatorError: not JSON, a malformed entry or ``__metadata__``, or data with holes or overlaps.
    """
    try:
        text = raw.decode("utf-8")
        found = json.loads(text, parse_float=_no_number, parse_constant=_no_number)
        if "\\u" in text:
            # Half a surrogate pair, which the reference implementation refuses, fails to encode.
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"its header is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _damaged(where, "its header is not a JSON object")
    metadata = found.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise _damaged(where, "its __metadata__ is not an object of strings")
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
