# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's routed experts stand on disk, and reading them from there, some at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kimi_k3.checkpoint import TextConfig, expert_shape, read_shard
from kimi_k3.checkpoint.headers import LENGTH_BYTES, truncated
from kimi_k3.checkpoint.index import INDEX_NAME, read_index
from kimi_k3.checkpoint.inspection import SINGLE_NAME
from kimi_k3.checkpoint.layout import EXPERT_PARTS, EXPERT_PROJECTIONS, LAYER_PREFIX, expert_prefix
from kimi_k3.checkpoint.messages import bad_checkpoint
from kimi_k3.files import open_regular
from kimi_k3.words.weights import Projection

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from kimi_k3.checkpoint import ShardHeader
    from kimi_k3.errors import OperatorError

SERVED_FROM = {Projection.W13: ("w1", "w3"), Projection.W2: ("w2",)}
"""The checkpoint's projections whose rows, one below the other, are a served one."""

BATCH_BYTES = 16 << 20
"""What is read at a time: of the published size one expert (w13) or two (w2), enough for a dozen cores, which
convert faster than disks read. Up to three batches are in memory: one is read, one waits, one is converted.
"""

# Numbers as the names spell them, so that a name with a leading zero is no expert's.
_NUMBER = "(0|[1-9][0-9]{0,8})"
_EXPERT_NAME = re.compile(
    rf"{re.escape(LAYER_PREFIX)}{_NUMBER}\.block_sparse_moe\.experts\.{_NUMBER}"
    rf"\.({'|'.join(EXPERT_PROJECTIONS)})\.({'|'.join(EXPERT_PARTS)})"
)
_ABSENT = -1


@dataclass(frozen=True)
class Batch:
    """Experts of one served projection.

    Attributes:
        experts: their numbers.
        packed: ``[E, N, K / 2]`` uint8, MXFP4.
        e8m0: ``[E, N, K / 32]`` uint8.
    """

    experts: tuple[int, ...]
    packed: npt.NDArray[np.uint8]
    e8m0: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of nibbles and scales."""
        return self.packed.nbytes + self.e8m0.nbytes


class ExpertFiles:
    """The routed experts of some layers of a checkpoint.

    Attributes:
        text: the decoder's config.
        layers: numbers, from 0, of the layers.
        identity: hash of config.json and the index, or of config.json and the header of a checkpoint without
            an index. Independent of where the checkpoint lies.
    """

    def __init__(self, directory: Path, text: TextConfig, layers: Sequence[int]) -> None:
        """Find every tensor; reads the headers of those shards only that hold one.

        Raises:
            OperatorError: a shard is missing, truncated or damaged, or a tensor is missing or is not as
                config.json says.
        """
        self.text = text
        self.layers = tuple(layers)
        self._shape = expert_shape(text)
        self._shards = [directory / name for name in _shards_with(directory, self.layers)]
        # [layers, experts, w1 w2 w3, codes and scales]: five megabytes for the published checkpoint, whose
        # headers would take hundreds.
        place = (len(self.layers), text.num_experts, len(EXPERT_PROJECTIONS), len(EXPERT_PARTS))
        self._shard = np.full(place, _ABSENT, dtype=np.int32)
        self._offset = np.zeros(place, dtype=np.int64)
        for number, path in enumerate(self._shards):
            self._find_in(number, read_shard(path))
        self.identity = _identity(directory, self._shards)
        self._require_all(directory)

    def nbytes(self, projection: Projection) -> int:
        """Bytes of nibbles and scales of all experts of one layer."""
        return self.text.num_experts * sum(
            rows * columns for rows, columns in map(self._dimensions(projection).__getitem__, EXPERT_PARTS)
        )

    def batches(self, layer: int, projection: Projection) -> Generator[Batch]:
        """All experts of a projection in the order of the file, the next batch being read meanwhile.

        Raises:
            OperatorError: a shard cannot be read, or has become shorter.
        """
        count = max(1, BATCH_BYTES * self.text.num_experts // self.nbytes(projection))
        order = self._in_file_order(layer, projection)
        parts = [order[start : start + count] for start in range(0, len(order), count)]
        with _Reader(self._shards) as reader, ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self._read, reader, layer, projection, parts[0])
            for following in (*parts[1:], ()):
                batch = coming.result()
                if following:
                    coming = ahead.submit(self._read, reader, layer, projection, following)
                yield batch

    def shards_of(self, layer: int, projection: Projection) -> str | None:
        """What says whether the files that hold a projection are still the same; ``None`` of other layers.

        A hash of their names, sizes and times of change: one that was downloaded again counts as another.
        """
        if layer not in self.layers:
            return None
        inside = [EXPERT_PROJECTIONS.index(name) for name in SERVED_FROM[projection]]
        digest = hashlib.sha256()
        for number in np.unique(self._shard[self.layers.index(layer)][:, inside]).tolist():
            path = self._shards[number]
            try:
                status = path.stat()
            except OSError as error:
                raise _unreadable(path, error) from None
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        return digest.hexdigest()[:16]

    def tensor_of(self, layer: int, projection: Projection, expert: int, row: int) -> tuple[str, int, str]:
        """Which tensor of scales, which of its rows and which shard hold the ``row`` of a served expert."""
        names = SERVED_FROM[projection]
        each = self._dimensions(projection)["weight_scale"][0] // len(names)
        name = names[row // each]
        shard = self._shard[self.layers.index(layer), expert, EXPERT_PROJECTIONS.index(name), -1]
        return (
            f"{expert_prefix(layer, expert)}.{name}.{EXPERT_PARTS[-1]}",
            row % each,
            self._shards[shard].name,
        )

    def _dimensions(self, projection: Projection) -> dict[str, tuple[int, int]]:
        """Rows and bytes per row of a served expert, by part."""
        names = SERVED_FROM[projection]
        shapes = {part: self._shape.specs[names[0], part][1] for part in EXPERT_PARTS}
        return {part: (len(names) * rows, columns) for part, (rows, columns) in shapes.items()}

    def _find_in(self, number: int, header: ShardHeader) -> None:
        data = LENGTH_BYTES + header.header_bytes
        rows = {layer: row for row, layer in enumerate(self.layers)}
        for tensor in header.tensors:
            match = _EXPERT_NAME.fullmatch(tensor.name)
            if match is None or (row := rows.get(int(match[1]))) is None:
                continue
            if (expert := int(match[2])) >= self.text.num_experts:
                continue
            dtype, shape = self._shape.specs[match[3], match[4]]
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                raise _unexpected(
                    f"{self._shards[number]}: tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected {dtype} {list(shape)}"
                )
            place = (row, expert, EXPERT_PROJECTIONS.index(match[3]), EXPERT_PARTS.index(match[4]))
            self._shard[place] = number
            self._offset[place] = data + tensor.start

    def _require_all(self, directory: Path) -> None:
        absent = np.argwhere(self._shard == _ABSENT)
        if len(absent):
            row, expert, projection, part = absent[0].tolist()
            name = f"{expert_prefix(self.layers[row], expert)}.{EXPERT_PROJECTIONS[projection]}"
            raise _unexpected(
                f"checkpoint {directory} lacks {len(absent):,} tensors of routed experts "
                f"(first {name}.{EXPERT_PARTS[part]})"
            )

    def _in_file_order(self, layer: int, projection: Projection) -> list[int]:
        first = EXPERT_PROJECTIONS.index(SERVED_FROM[projection][0])
        place = (self.layers.index(layer), slice(None), first, 0)
        order: list[int] = np.lexsort((self._offset[place], self._shard[place])).tolist()
        return order

    def _read(self, reader: _Reader, layer: int, projection: Projection, experts: Sequence[int]) -> Batch:
        shapes = self._dimensions(projection)
        packed, e8m0 = (np.empty((len(experts), *shapes[part]), dtype=np.uint8) for part in EXPERT_PARTS)
        names = SERVED_FROM[projection]
        reads: list[tuple[int, int, npt.NDArray[np.uint8]]] = []
        for position, expert in enumerate(experts):
            for index, array in enumerate((packed, e8m0)):
                for name, rows in zip(names, np.split(array[position], len(names)), strict=True):
                    place = (self.layers.index(layer), expert, EXPERT_PROJECTIONS.index(name), index)
                    reads.append((int(self._shard[place]), int(self._offset[place]), rows))
        for shard, offset, rows in sorted(reads, key=lambda read: read[:2]):
            reader.read(shard, offset, rows)
        return Batch(tuple(experts), packed, e8m0)


class _Reader(contextlib.AbstractContextManager["_Reader"]):
    """Reads ranges of shards that it opens when they are first needed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._files: dict[int, int] = {}
        self._open = contextlib.ExitStack()

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, shard: int, offset: int, into: npt.NDArray[np.uint8]) -> None:
        """Fill ``into`` with the bytes at ``offset``."""
        path = self._paths[shard]
        view, done = into.reshape(-1).data, 0
        try:
            if shard not in self._files:
                self._files[shard] = self._open.enter_context(open_regular(path)).fileno()
            file = self._files[shard]
            while done < len(view):
                count = os.preadv(file, [view[done:]], offset + done)
                if count == 0:
                    raise truncated(str(path), os.fstat(file).st_size, offset + len(view))
                done += count
            # Nobody reads it again soon, and terabytes of it would push everything else out of the cache.
            os.posix_fadvise(file, offset, done, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _unreadable(path, error) from None


def _shards_with(directory: Path, layers: Iterable[int]) -> list[str]:
    """Names of the shards that hold a routed expert of one of ``layers``, in the order of their names."""
    index = directory / INDEX_NAME
    shards = read_index(index).shards if index.exists() else {}
    if not shards and not (directory / SINGLE_NAME).exists():
        raise bad_checkpoint(f"checkpoint {directory} has no {INDEX_NAME} with shards", "download that file")
    if not shards:
        return [SINGLE_NAME]
    wanted = set(map(str, layers))
    matches = {shard: map(_EXPERT_NAME.fullmatch, names) for shard, names in shards.items()}
    return sorted(
        shard for shard, found in matches.items() if any(match and match[1] in wanted for match in found)
    )


def _identity(directory: Path, shards: Sequence[Path]) -> str:
    """``sha256:...`` of what says which checkpoint this is; see :class:`ExpertFiles`."""
    digest = hashlib.sha256()
    index = directory / INDEX_NAME
    headers = [shard for shard in shards if shard.name == SINGLE_NAME]
    for path in (directory / "config.json", *([index] if index.exists() else headers)):
        try:
            with open_regular(path) as file:
                size = -1
                if path in headers:
                    size = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
                    file.seek(0)
                # Each hashed by itself, so that no byte can move from one to the next.
                digest.update(hashlib.sha256(file.read(size)).digest())
        except OSError as error:
            raise _unreadable(path, error) from None
    return f"sha256:{digest.hexdigest()}"


def _unreadable(path: Path, error: OSError) -> OperatorError:
    return bad_checkpoint(
        f"{path} cannot be read ({error.strerror})", "check its permissions and the file system"
    )


def _unexpected(what: str) -> OperatorError:
    return bad_checkpoint(what, "config.json and shards are of different revisions: download both again")
