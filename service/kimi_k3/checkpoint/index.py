# SPDX-License-Identifier: Apache-2.0
"""Read ``model.safetensors.index.json``: which shard holds which tensor.

The published index has 60 MB and half a million entries, and this is also read on the small machines that
plan a deployment. So the entries are walked one by one in the text instead of being kept.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kimi_k3.checkpoint.messages import bad_checkpoint
from kimi_k3.files import FileTooLarge, NotRegularFile, read_small

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kimi_k3.errors import OperatorError

INDEX_NAME = "model.safetensors.index.json"
#: Bytes; ten times the published index.
INDEX_MAX_BYTES = 640 << 20
#: Bytes; what Linux's file systems allow (``NAME_MAX``).
FILE_NAME_MAX_BYTES = 255
#: Bytes; sizes are 64-bit numbers.
_SIZE_MAX = (1 << 63) - 1

_SPACE = re.compile(r"[ \t\n\r]*")
# Runs of plain characters, possessive: no step of this backtracks, which half a million entries would feel.
_STRING = r'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"'
_KEY = re.compile(rf"[ \t\n\r]*{_STRING}[ \t\n\r]*:[ \t\n\r]*")
_PAIR = re.compile(rf"[ \t\n\r]*{_STRING}[ \t\n\r]*:[ \t\n\r]*{_STRING}[ \t\n\r]*([,}}])")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Index:
    """What the index says, without the names.

    Attributes:
        path: the file.
        total_size: bytes of all tensors according to its metadata; None if it does not say.
        shards: per shard, a hash of every tensor name it should hold (Python's ``hash``: valid in this
            process only).
    """

    path: Path
    total_size: int | None
    shards: dict[str, array[int]]

    @property
    def tensor_count(self) -> int:
        """Entries of the index."""
        return sum(map(len, self.shards.values()))


def _damaged(path: Path, why: str) -> OperatorError:
    return bad_checkpoint(f"{path} is damaged ({why})", "download the index again")


def _plain(string: str) -> str:
    """A JSON string's text, given what stands between its quotes."""
    if "\\" not in string:
        return string
    value = json.loads(f'"{string}"')
    assert isinstance(value, str)
    return value


def _skip(text: str, position: int) -> int:
    """The position behind any white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _walk_pairs(text: str, position: int, add: Callable[[str, str], object]) -> int:
    """Give every pair of the object of strings at ``position`` to ``add``; returns the position behind it.

    Raises:
        ValueError: not an object, or one that holds anything but strings.
    """
    if not text.startswith("{", position):
        raise ValueError("weight_map is not an object")
    position += 1
    empty = _skip(text, position)
    if text.startswith("}", empty):
        return empty + 1
    more = True
    while more:
        pair = _PAIR.match(text, position)
        if pair is None:
            raise ValueError(f"weight_map has no pair of strings at character {position}")
        name, shard, last = pair.groups()
        add(_plain(name), _plain(shard))
        position = pair.end()
        more = last == ","
    return position


def parse_index(text: str, add: Callable[[str, str], object]) -> dict[str, object]:
    """Walk the text of an index.

    Args:
        text: all of it.
        add: called with tensor name and shard for every entry of ``weight_map``.

    Returns:
        The other keys of the index, such as ``metadata``.

    Raises:
        ValueError: the text is not a JSON object with a ``weight_map`` of strings.
    """
    others: dict[str, object] = {}
    mapped = False
    position = _skip(text, 0)
    if not text.startswith("{", position):
        raise ValueError("not a JSON object")
    more = True
    while more:
        match = _KEY.match(text, position + 1)
        if match is None:
            raise ValueError(f"no key at character {position + 1}")
        key, position = _plain(match[1]), match.end()
        if key == "weight_map":
            position = _walk_pairs(text, position, add)
            mapped = True
        else:
            others[key], position = _DECODER.raw_decode(text, position)
        position = _skip(text, position)
        more = text.startswith(",", position)
        if not more and not text.startswith("}", position):
            raise ValueError(f"neither comma nor brace at character {position}")
    if _skip(text, position + 1) != len(text):
        raise ValueError(f"text behind its end, at character {position + 1}")
    if not mapped:
        raise ValueError("it has no weight_map")
    return others


def _read_text(path: Path) -> str:
    try:
        raw = read_small(path, limit=INDEX_MAX_BYTES)
    except (NotRegularFile, FileTooLarge) as error:
        raise _damaged(path, str(error.strerror)) from None
    except OSError as error:
        raise bad_checkpoint(
            f"{path} cannot be read ({error.strerror})", "check its permissions and the file system"
        ) from None
    # As in config.json: vLLM's reader does not take one either.
    if raw.startswith(codecs.BOM_UTF8):
        raise _damaged(path, "it begins with a UTF-8 byte order mark (BOM), which JSON does not allow")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _damaged(path, "not UTF-8 text") from None


def _parse(path: Path, add: Callable[[str, str], object]) -> dict[str, object]:
    try:
        return parse_index(_read_text(path), add)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None


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
    try:
        return len(name.encode("utf-8")) <= FILE_NAME_MAX_BYTES
    except UnicodeEncodeError:
        # Half a surrogate pair: JSON's escapes can spell it, no UTF-8 name holds it.
        return False


def read_index(path: Path) -> Index:
    """Read an index into per-shard hashes of names.

    Raises:
        OperatorError: unreadable, not JSON, no ``weight_map``, or a shard that is not a plain file name.
    """
    shards: dict[str, array[int]] = {}

    def add(name: str, shard: str) -> None:
        if shard not in shards:
            if not _is_file_name(shard):
                raise ValueError(f"{shard!r:.200} is not a file name")
            shards[shard] = array("q")
        shards[shard].append(hash(name))

    others = _parse(path, add)
    metadata = others.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(path=path, total_size=_whole(total), shards=shards)


def names_of(path: Path, hashes: set[int], *, limit: int) -> list[str]:
    """The first ``limit`` tensor names of the index whose hash is in ``hashes``, sorted.

    Raises:
        OperatorError: as :func:`read_index`.
    """
    found: list[str] = []
    _parse(path, lambda name, _: found.append(name) if hash(name) in hashes else None)
    return sorted(found)[:limit]
