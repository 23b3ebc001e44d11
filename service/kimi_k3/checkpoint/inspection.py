# SPDX-License-Identifier: Apache-2.0
"""Look at a checkpoint directory and say what is there and what is wrong with it.

Reads config.json, the tokenizer, the index and the headers of the shards, never the weights: the published
1.42 TiB take a few seconds. One shard's names are kept at a time; of the others only what must be compared.
"""

from __future__ import annotations

import gc
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING

from kimi_k3.checkpoint.config import read_config
from kimi_k3.checkpoint.headers import ShardHeader, TruncatedShard, read_header, truncated
from kimi_k3.checkpoint.index import INDEX_NAME, Index, read_index
from kimi_k3.checkpoint.layout import (
    EXPERT_PARTS,
    EXPERT_PROJECTIONS,
    ExpertShape,
    expert_prefix,
    expert_shape,
    layer_tensors,
    outer_tensors,
)
from kimi_k3.checkpoint.messages import bad_checkpoint
from kimi_k3.checkpoint.preprocessing import preprocessing_problems
from kimi_k3.checkpoint.problem import Problem, ProblemKind
from kimi_k3.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kimi_k3.checkpoint.config import KimiK3Config, TextConfig
    from kimi_k3.checkpoint.headers import TensorEntry

#: The file name of a checkpoint that has one shard and no index.
SINGLE_NAME = "model.safetensors"
#: Where ``hf download --local-dir`` keeps files it has not finished.
DOWNLOADS = ".cache/huggingface/download"
_DOWNLOAD_AGAIN = "download the checkpoint again (a download resumes where it stopped)"
#: (projection, part) in the order of an expert's six bytes in ``_Tally.seen``.
_EXPERT_SLOTS = [(projection, part) for projection in EXPERT_PROJECTIONS for part in EXPERT_PARTS]
#: ``TensorEntry.name``, without a Python call per tensor.
_NAME_OF = itemgetter(0)
_PER_EXPERT = len(_EXPERT_SLOTS)
#: Parts of ``language_model.model.layers.L.block_sparse_moe.experts.E.w1.weight_packed``.
_EXPERT_NAME_PARTS = 9
_SLOT_OF = {names: slot for slot, names in enumerate(_EXPERT_SLOTS)}


class ShardState(StrEnum):
    """What became of a shard."""

    OK = "ok"
    MISSING = "missing"
    TRUNCATED = "truncated"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file.

    Attributes:
        name: its file name.
        size: bytes on disk; None if it is missing or no regular file.
        expected: bytes it has according to its own header; None if no header could be read.
        state: the verdict.
    """

    name: str
    size: int | None
    expected: int | None
    state: ShardState


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk. Layer numbers count from 0; None is "not known", never "none".

    Attributes:
        path: the directory.
        config: the parts of its config.json in use.
        layers: number of decoder layers.
        kda_layers, mla_layers: layers by kind of attention.
        moe_layers, dense_layers: layers by kind of feed-forward block.
        experts: routed experts per MoE layer.
        expert: shapes, dtypes and bytes of one routed expert, from the config.
        tensor_count: entries of the index (of the header, without an index); None without weights.
        bytes_by_dtype: bytes of tensors per safetensors dtype; None unless every header was read.
        total_bytes: bytes of all tensors; None unless every header was read.
        routed_expert_bytes: bytes of the routed experts' codes and scales; None unless every header was read.
        index_total_size: what the index claims; None without an index or a claim.
        shards: in the order of their names.
        problems: everything found wrong, worst first.
    """

    path: Path
    config: KimiK3Config
    layers: int
    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]
    experts: int
    expert: ExpertShape
    tensor_count: int | None
    bytes_by_dtype: Mapping[str, int] | None
    total_bytes: int | None
    routed_expert_bytes: int | None
    index_total_size: int | None
    shards: tuple[Shard, ...]
    problems: tuple[Problem, ...]

    @property
    def fatal(self) -> tuple[Problem, ...]:
        """The problems that forbid serving."""
        return tuple(problem for problem in self.problems if problem.fatal)


def _some(names: Iterable[str], count: int, limit: int = 3) -> str:
    """The first of ``count`` names: ``a, b, c and 4 more``."""
    more = f" and {count - limit:,} more" if count > limit else ""
    return ", ".join(f"{name:.200}" for name in islice(names, limit)) + more


@dataclass(slots=True)
class _Tally:
    """What has been seen so far, shard after shard."""

    text: TextConfig
    expert: ExpertShape
    #: Per MoE layer one byte per (expert, projection, part): seen or not.
    seen: dict[str, bytearray] = field(init=False)
    #: Every other tensor the decoder needs, until it is seen: name -> dtype, shape.
    wanted: dict[str, tuple[str, tuple[int, ...]]] = field(init=False)
    #: dtype and shape per (projection, part).
    slots: list[tuple[str, tuple[int, ...]]] = field(init=False)
    #: Position of an expert's first byte in ``seen``, by its number as names spell it.
    first_slot: dict[str, int] = field(init=False)
    by_dtype: dict[str, int] = field(default_factory=dict)
    routed: int = 0
    count: int = 0
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = self.text
        self.seen = {str(layer): bytearray(text.num_experts * _PER_EXPERT) for layer in text.moe_layers}
        self.wanted = {spec.name: (spec.dtype, spec.shape) for spec in outer_tensors(text)}
        for layer in range(text.num_hidden_layers):
            self.wanted.update((spec.name, (spec.dtype, spec.shape)) for spec in layer_tensors(text, layer))
        self.slots = list(self.expert.specs.values())
        self.first_slot = {str(expert): expert * _PER_EXPERT for expert in range(text.num_experts)}

    def add(self, tensors: Sequence[TensorEntry]) -> None:
        """Account for the tensors of one header."""
        # Locals: this loop runs half a million times.
        by_dtype, layers, experts, slots = self.by_dtype, self.seen, self.first_slot, self.slots
        self.count += len(tensors)
        for tensor in tensors:
            name, dtype, shape, _, nbytes = tensor
            by_dtype[dtype] = by_dtype.get(dtype, 0) + nbytes
            parts = name.split(".")
            if len(parts) == _EXPERT_NAME_PARTS and parts[5] == "experts":
                seen, first = layers.get(parts[3]), experts.get(parts[6])
                slot = _SLOT_OF.get((parts[7], parts[8]))
                if seen is not None and first is not None and slot is not None:
                    self.routed += nbytes
                    seen[first + slot] = 1
                    if shape != slots[slot][1] or dtype != slots[slot][0]:
                        self._complain(tensor, *slots[slot])
                continue
            want = self.wanted.pop(name, None)
            # Of these only shapes are compared: vLLM converts their dtypes while it loads them.
            if want is not None and shape != want[1]:
                self._complain(tensor, *want)

    def _complain(self, tensor: TensorEntry, dtype: str, shape: tuple[int, ...]) -> None:
        found = f"{tensor.dtype} {list(tensor.shape)!s:.200}"
        self.unexpected.append(f"{tensor.name:.200} is {found}, expected {dtype} {list(shape)}")

    def missing_count(self) -> int:
        """How many of the decoder's tensors no shard has."""
        return sum(seen.count(0) for seen in self.seen.values()) + len(self.wanted)

    def missing(self) -> Iterator[str]:
        """Their names, the routed experts' first; one by one, since a wrong config can call for millions."""
        experts = (
            ".".join((expert_prefix(int(layer), slot // _PER_EXPERT), *_EXPERT_SLOTS[slot % _PER_EXPERT]))
            for layer, seen in self.seen.items()
            if not all(seen)
            for slot, there in enumerate(seen)
            if not there
        )
        return chain(experts, self.wanted)


def _look_at_shard(directory: Path, name: str) -> tuple[Shard, ShardHeader | None, Problem | None]:
    """Read one shard's header and judge the file."""
    path = directory / name
    try:
        status = path.stat()
    except OSError:
        # Without a target in the hub's cache, a link to a shard that is not there counts as missing.
        return Shard(name, None, None, ShardState.MISSING), None, None
    size = status.st_size
    try:
        header = read_header(path, size=size)
    except TruncatedShard as error:
        problem = Problem.of(ProblemKind.TRUNCATED_SHARD, error.what, error.remedy)
        return Shard(name, size, None, ShardState.TRUNCATED), None, problem
    except OperatorError as error:
        problem = Problem.of(ProblemKind.DAMAGED_SHARD, error.what, error.remedy)
        known = size if stat.S_ISREG(status.st_mode) else None
        return Shard(name, known, None, ShardState.DAMAGED), None, problem
    if size < header.file_bytes:
        cut = truncated(str(path), size, header.file_bytes)
        problem = Problem.of(ProblemKind.TRUNCATED_SHARD, cut.what, cut.remedy)
        return Shard(name, size, header.file_bytes, ShardState.TRUNCATED), header, problem
    if size > header.file_bytes:
        what = f"{path} is {size - header.file_bytes:,} bytes longer than its header says"
        problem = Problem.of(ProblemKind.DAMAGED_SHARD, what, "download that file again")
        return Shard(name, size, header.file_bytes, ShardState.DAMAGED), header, problem
    return Shard(name, size, header.file_bytes, ShardState.OK), header, None


@contextmanager
def _no_collector() -> Iterator[None]:
    """Pause the cyclic garbage collector: headers are acyclic, and it would walk each of them in vain.

    Takes about a fifth off the time for the published checkpoint.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def incomplete_files(directory: Path) -> list[str]:
    """Leftovers of a download, or its unfinished files, relative to ``directory``."""
    found = [*directory.glob("*.incomplete")]
    # Whoever downloaded may have kept that directory to themselves; the shards tell as much.
    with suppress(PermissionError):
        found += (directory / DOWNLOADS).rglob("*.incomplete")
    return sorted(str(path.relative_to(directory)) for path in found)


def _weights(directory: Path) -> tuple[Index | None, list[str], list[Problem]]:
    """Find the index, the shards to read, and what is wrong about that."""
    index_path = directory / INDEX_NAME
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if index_path.exists():
        index = read_index(index_path)
        if index.shards:
            return index, sorted(index.shards), []
    if not files:
        what = f"checkpoint {directory} has no *.safetensors file"
        return None, [], [Problem.of(ProblemKind.NO_WEIGHTS, what, _DOWNLOAD_AGAIN)]
    if files == [SINGLE_NAME]:
        return None, files, []
    what = f"checkpoint {directory} has {len(files)} *.safetensors files but no {INDEX_NAME} that names them"
    return None, files, [Problem.of(ProblemKind.NO_INDEX, what, "download the index")]


def inspect_checkpoint(path: Path) -> Checkpoint:
    """Look at the checkpoint in directory ``path``.

    What can be counted is reported in :attr:`Checkpoint.problems`; what cannot even be read, or is
    another model, raises.

    Raises:
        OperatorError: no such directory, an empty one, config.json missing or unreadable or of another
            architecture or quantisation, or an unreadable index.
    """
    _require_directory(path)
    config = read_config(path / "config.json")
    with _no_collector():
        return _inspect(path, config)


def _inspect(path: Path, config: KimiK3Config) -> Checkpoint:
    text = config.text_config
    index, names, problems = _weights(path)
    tally = _Tally(text, expert_shape(text))
    shards: list[Shard] = []
    lacking: list[str] = []
    lacking_shards: list[str] = []
    for name in names:
        shard, header, problem = _look_at_shard(path, name)
        shards.append(shard)
        if problem is not None:
            problems.append(problem)
        if header is not None:
            tally.add(header.tensors)
            if index is not None:
                absent = set(index.shards[name]).difference(map(_NAME_OF, header.tensors))
                lacking += sorted(absent)
                lacking_shards += [name] if absent else []
    if missing := [shard.name for shard in shards if shard.state is ShardState.MISSING]:
        some = _some(missing, len(missing))
        what = f"checkpoint {path} lacks {len(missing)} of {len(shards)} shards ({some})"
        problems.append(Problem.of(ProblemKind.MISSING_SHARD, what, _DOWNLOAD_AGAIN))
    if incomplete := incomplete_files(path):
        what = f"checkpoint {path} has unfinished downloads ({_some(incomplete, len(incomplete))})"
        remedy = "let the download finish or resume it, or delete those files if nothing needs them"
        problems.append(Problem.of(ProblemKind.INCOMPLETE_FILE, what, remedy))
    if index is not None and lacking:
        what = (
            f"{index.path} names {len(lacking):,} tensors that their shards do not hold "
            f"(in {_some(lacking_shards, len(lacking_shards))}; first {lacking[0]:.200})"
        )
        remedy = "index and shards are of different revisions: download both again"
        problems.append(Problem.of(ProblemKind.TENSOR_NOT_IN_SHARD, what, remedy))
    complete = bool(shards) and all(shard.expected is not None for shard in shards)
    total = sum(tally.by_dtype.values()) if complete else None
    problems += _content_problems(path, tally, complete=complete)
    if index is not None and None not in (total, index.total_size) and total != index.total_size:
        what = f"{index.path} says total_size {index.total_size:,}, its shards hold {total:,} bytes"
        problems.append(
            Problem.of(ProblemKind.TOTAL_SIZE, what, "check that all files are of one revision", fatal=False)
        )
    problems += preprocessing_problems(path)
    order = list(ProblemKind)
    return Checkpoint(
        path=path,
        config=config,
        layers=text.num_hidden_layers,
        kda_layers=text.kda_layers,
        mla_layers=text.mla_layers,
        moe_layers=text.moe_layers,
        dense_layers=text.dense_layers,
        experts=text.num_experts,
        expert=tally.expert,
        tensor_count=index.tensor_count if index is not None else tally.count if complete else None,
        bytes_by_dtype=dict(sorted(tally.by_dtype.items())) if complete else None,
        total_bytes=total,
        routed_expert_bytes=tally.routed if complete else None,
        index_total_size=index.total_size if index is not None else None,
        shards=tuple(shards),
        problems=tuple(sorted(problems, key=lambda problem: order.index(problem.kind))),
    )


def _content_problems(path: Path, tally: _Tally, *, complete: bool) -> list[Problem]:
    """Tensors that are not there or not as the config says."""
    problems = []
    # Without all headers everything in the unread shards would count as missing.
    if complete and (missing := tally.missing_count()):
        some = _some(tally.missing(), missing)
        what = f"checkpoint {path} lacks {missing:,} tensors its config.json calls for ({some})"
        remedy = "config.json and shards are of different revisions: download both again"
        problems.append(Problem.of(ProblemKind.MISSING_TENSOR, what, remedy))
    if tally.unexpected:
        count, first = len(tally.unexpected), tally.unexpected[0]
        what = f"checkpoint {path} has {count:,} tensors of another shape ({first})"
        remedy = "config.json and shards are of different revisions: download both again"
        problems.append(Problem.of(ProblemKind.UNEXPECTED_TENSOR, what, remedy))
    return problems


def _require_directory(path: Path) -> None:
    """Raise unless ``path`` is a directory that has a config.json."""
    try:
        if not path.exists():
            raise bad_checkpoint(
                f"checkpoint {path} does not exist", "check the path, or download the checkpoint there"
            )
        if not path.is_dir():
            raise bad_checkpoint(f"checkpoint {path} is a file", "name the directory that holds config.json")
        if next(path.iterdir(), None) is None:
            raise bad_checkpoint(
                f"checkpoint {path} is an empty directory", "download the checkpoint into it"
            )
        if not (path / "config.json").exists():
            raise bad_checkpoint(
                f"checkpoint {path} has no config.json", "name the directory that holds config.json"
            )
    except OSError as error:
        raise bad_checkpoint(
            f"checkpoint {path} cannot be read ({error.strerror})",
            "check its permissions and the file system",
        ) from None


def require_servable(path: Path, *, weights_only: bool = False) -> Checkpoint:
    """As :func:`inspect_checkpoint`, but any fatal problem raises.

    Args:
        weights_only: for who reads nothing else, and needs no tokenizer.

    Raises:
        OperatorError: names the worst problem and how many more there are.
    """
    checkpoint = inspect_checkpoint(path)
    fatal = checkpoint.fatal
    if weights_only:
        fatal = tuple(problem for problem in fatal if problem.kind is not ProblemKind.PREPROCESSING)
    if fatal:
        worst, *rest = fatal
        more = f" (and {len(rest)} more {'problem' if len(rest) == 1 else 'problems'})" if rest else ""
        raise bad_checkpoint(worst.what + more, worst.remedy)
    return checkpoint
