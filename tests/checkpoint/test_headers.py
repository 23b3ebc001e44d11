# SPDX-License-Identifier: Apache-2.0
"""Safetensors headers: what is accepted, and that nothing else gets through."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.checkpoint.headers import MAX_HEADER_BYTES, TruncatedShard, parse_header, read_shard
from kimi_k3.checkpoint.layout import TensorSpec
from kimi_k3.checkpoint.tiny import safetensors_header
from kimi_k3.errors import ExitCode, OperatorError

from .imitation import FOREIGN, SPECIAL_FILES

if TYPE_CHECKING:
    from pathlib import Path

SPECS = (TensorSpec("a", "BF16", (2, 3)), TensorSpec("none", "F32", (0,)), TensorSpec("b", "U8", (5,)))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
numbers = st.integers(-1, 2**70) | st.booleans() | st.floats() | st.none()
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["BF16", "F4", "U8", "X9"]) | json_values,
        "shape": st.lists(numbers, max_size=4) | json_values,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | json_values,
    },
)


def write(path: Path, header: bytes, data: int) -> Path:
    """A file with ``header`` and ``data`` zero bytes."""
    path.write_bytes(header + bytes(data))
    return path


def test_round_trip(tmp_path: Path) -> None:
    """What the tiny checkpoint's writer writes is what the reader reads, in the order of the data."""
    header = read_shard(write(tmp_path / "x", safetensors_header(SPECS), 17))
    assert [(t.name, t.dtype, t.shape) for t in header.tensors] == [(s.name, s.dtype, s.shape) for s in SPECS]
    assert [t.start for t in header.tensors] == [0, 12, 12]
    assert header.data_bytes == 17
    assert header.file_bytes == (tmp_path / "x").stat().st_size


def test_reference_reader_agrees(tmp_path: Path) -> None:
    """The files must be safetensors for the reference implementation, not only for ours."""
    safetensors = pytest.importorskip("safetensors")
    path = write(tmp_path / "x", safetensors_header(SPECS), 17)
    with safetensors.safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == ["a", "b", "none"]


@pytest.mark.parametrize("size", [0, 3, 8, 20])
def test_cut_inside_header(tmp_path: Path, size: int) -> None:
    """A download that stopped early must be called truncated, whatever it stopped in."""
    path = tmp_path / "x"
    path.write_bytes(safetensors_header(SPECS)[:size])
    with pytest.raises(TruncatedShard, match="truncated"):
        read_shard(path)


@pytest.mark.parametrize(
    ("data", "kind", "words"), [(16, TruncatedShard, "truncated"), (18, OperatorError, "follow")]
)
def test_data_of_wrong_length(tmp_path: Path, data: int, kind: type[OperatorError], words: str) -> None:
    """One byte too few or too many means that the file is not the one its header describes."""
    with pytest.raises(kind, match=words):
        read_shard(write(tmp_path / "x", safetensors_header(SPECS), data))


def test_huge_header_is_not_read(tmp_path: Path) -> None:
    """A damaged length field must not make us allocate gigabytes."""
    path = tmp_path / "x"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    with pytest.raises(OperatorError, match="would have"):
        read_shard(path)


def test_missing_file(tmp_path: Path) -> None:
    """A path that is not there is the operator's to mend, not a traceback."""
    with pytest.raises(OperatorError, match="No such file"):
        read_shard(tmp_path / "x")


BAD_METADATA: tuple[Any, ...] = (
    {"format": 5},
    {"format": None},
    {"a": {}},
    {"a": "\ud800"},
    [1],
    [],
    "x",
    0,
    False,
)
GOOD_METADATA: tuple[Any, ...] = (None, {}, {"format": "pt"}, {"a": "\U0001f600"})


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    """One header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 1},
        {"a": {}},
        {"a": entry(dtype="F5")},
        {"a": entry(dtype=["U8"])},
        {"a": entry(shape=[-4])},
        {"a": entry(shape=[True, 4])},
        {"a": entry(shape=[4.0])},
        {"a": entry(shape=[[4]])},
        {"a": entry(shape=[2**62, 2**62])},
        {"a": entry(dtype="F4", shape=[3], offsets=[0, 1])},
        {"a": entry(offsets=[0, 5])},
        {"a": entry(offsets=[4, 0])},
        {"a": entry(offsets=[0])},
        {"a": entry(offsets=[False, 4])},
        {"a": entry(offsets=[1, 5])},
        {"a": entry(), "b": entry(offsets=[2, 6])},
        {"a": entry(), "b": entry(offsets=[5, 9])},
        {"a\ud800": entry()},
        *[{"__metadata__": metadata, "a": entry()} for metadata in BAD_METADATA],
    ],
)
def test_malformed(header: Any) -> None:
    """Each of these would make a reader compute a wrong place or size, or is refused by vLLM's reader."""
    with pytest.raises(OperatorError, match="not a valid safetensors file") as caught:
        parse_header(json.dumps(header).encode(), where="x")
    assert caught.value.exit_code is ExitCode.BAD_CHECKPOINT


@pytest.mark.parametrize("metadata", GOOD_METADATA)
def test_metadata(metadata: Any) -> None:
    """Writers leave notes in a header; those must not be taken for a tensor or for damage."""
    raw = json.dumps({"__metadata__": metadata, "a": entry()}).encode()
    assert [tensor.name for tensor in parse_header(raw, where="x").tensors] == ["a"]


@pytest.mark.parametrize("metadata", [*BAD_METADATA, *GOOD_METADATA])
def test_reference_reader_agrees_on_metadata(tmp_path: Path, metadata: Any) -> None:
    """vLLM opens shards with the reference reader: what it refuses must be damaged here, and only that."""
    safetensors = pytest.importorskip("safetensors")
    raw = json.dumps({"__metadata__": metadata, "a": entry()}).encode()
    path = write(tmp_path / "x", len(raw).to_bytes(8, "little") + raw, 4)
    try:
        with safetensors.safe_open(path, framework="np"):
            good = True
    except safetensors.SafetensorError:
        good = False
    assert good is (refusal(raw) is None)


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_no_regular_file(tmp_path: Path, kind: str) -> None:
    """Opening a FIFO would wait for ever, and a directory's size is not that of a header."""
    SPECIAL_FILES[kind](tmp_path / "x")
    with pytest.raises(OperatorError, match=f"it is a {kind}, not a regular file"):
        read_shard(tmp_path / "x")


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_text(text: str) -> None:
    """A tensor's name or dtype in a message must neither steer the terminal nor fail to be encoded."""
    for header in ({text: entry(dtype="F5")}, {text: entry(offsets=[1, 5])}, {"a": entry(dtype=text)}):
        line = refusal(json.dumps(header).encode())
        assert line is not None
        assert line.isprintable()


def refusal(raw: bytes) -> str | None:
    """The line an operator gets for this header; None if it is accepted."""
    try:
        header = parse_header(raw, where="x")
    except OperatorError as error:
        return str(error)
    assert header.data_bytes == sum(tensor.nbytes for tensor in header.tensors)
    return None


@given(st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    """A header comes from outside: whatever it holds, the operator gets one line."""
    assert "\n" not in (refusal(raw) or "")


@given(json_values | st.dictionaries(st.text(max_size=8), entries, max_size=4))
def test_any_json(value: Any) -> None:
    """As above for bytes that are JSON of nearly the right form, which random bytes never are."""
    assert "\n" not in (refusal(json.dumps(value).encode()) or "")


def test_deep_nesting() -> None:
    """JSON nested too deeply for the parser is a damaged file, not a crash."""
    with pytest.raises(OperatorError):
        parse_header(b"[" * 100_000, where="x")
