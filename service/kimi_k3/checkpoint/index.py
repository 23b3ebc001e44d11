# SPDX-License-Identifier: Apache-2.0
"""Read ``model.safetensors.index.json``: which shard holds which tensor.

The published index has 60 MB and half a million entries, and is also read on the small machines that plan a
deployment: hence msgspec, which takes a fraction of a second and checks the types on the way.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kimi_k3.checkpoint.messages import bad_checkpoint
from kimi_k3.files import FileTooLarge, NotRegularFile, read_small

if TYPE_CHECKING:
    from pathlib import Path

    from kimi_k3.errors import OperatorError

INDEX_NAME = "model.safetensors.index.json"
#: Bytes; ten times the published index.
INDEX_MAX_BYTES = 640 << 20
#: Bytes; what Linux's file systems allow (``NAME_MAX``).
FILE_NAME_MAX_BYTES = 255
#: Bytes; sizes are 64-bit numbers.
_SIZE_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Index:
    """What the index says.

    Attributes:
        path: the file.
        total_size: bytes of all tensors according to its metadata; None if it does not say.
        shards: per shard the names of the tensors it should hold.
    """

    path: Path
    total_size: int | None
    shards: dict[str, list[str]]

    @property
    def tensor_count(self) -> int:
        """Entries of the index."""
        return sum(map(len, self.shards.values()))


class _Text(msgspec.Struct, gc=False):
    """The file as it is written; keys that nothing here needs are passed over."""

    weight_map: dict[str, str]
    metadata: Any = None


def _damaged(path: Path, why: str) -> OperatorError:
    return bad_checkpoint(f"{path} is damaged ({why})", "download the index again")


def _read(path: Path) -> bytes:
    try:
        return read_small(path, limit=INDEX_MAX_BYTES)
    except (NotRegularFile, FileTooLarge) as error:
        raise _damaged(path, str(error.strerror)) from None
    except OSError as error:
        raise bad_checkpoint(
            f"{path} cannot be read ({error.strerror})", "check its permissions and the file system"
        ) from None


def _whole(value: object) -> int | None:
    """``value`` as a number of bytes, None if it cannot be one; some writers store one as a float."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= _SIZE_MAX else None


def _is_file_name(name: str) -> bool:
    """Whether a file in the checkpoint's directory can have this name."""
    # A shard named ../x would make this read, and vLLM load, a file from elsewhere.
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    return len(name.encode("utf-8")) <= FILE_NAME_MAX_BYTES


def read_index(path: Path) -> Index:
    """Read an index.

    Raises:
        OperatorError: unreadable, not JSON, no ``weight_map``, or a shard that is not a plain file name.
    """
    raw = _read(path)
    # As in config.json: vLLM's reader does not take one either.
    if raw.startswith(codecs.BOM_UTF8):
        raise _damaged(path, "it begins with a UTF-8 byte order mark (BOM), which JSON does not allow")
    try:
        text = msgspec.json.decode(raw, type=_Text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    shards: dict[str, list[str]] = {}
    for name, shard in text.weight_map.items():
        if shard not in shards:
            if not _is_file_name(shard):
                raise _damaged(path, f"{shard!r:.200} is not a file name")
            shards[shard] = []
        shards[shard].append(name)
    total = text.metadata.get("total_size") if isinstance(text.metadata, dict) else None
    return Index(path=path, total_size=_whole(total), shards=shards)
