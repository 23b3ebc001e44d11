# SPDX-License-Identifier: Apache-2.0
"""The index: what it says, and that nothing else gets through."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.checkpoint.index import INDEX_MAX_BYTES, INDEX_NAME, read_index
from kimi_k3.errors import OperatorError

from .imitation import SPECIAL_FILES

if TYPE_CHECKING:
    from pathlib import Path

shard_names = st.text("abc.é-", min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))
maps = st.dictionaries(st.text(max_size=12), shard_names, max_size=6)
others = st.dictionaries(
    st.text(max_size=5).filter(lambda key: key != "weight_map"),
    st.none() | st.integers() | st.text(max_size=5) | st.lists(st.booleans(), max_size=3),
    max_size=3,
)


@given(maps, others, others, st.sampled_from([None, 2]), st.booleans())
def test_same_as_json(
    tmp_path_factory: pytest.TempPathFactory,
    weight_map: dict[str, str],
    before: dict[str, object],
    after: dict[str, object],
    indent: int | None,
    ascii_only: bool,
) -> None:
    """However a writer lays the file out, nothing of it may be lost or read differently."""
    path = tmp_path_factory.mktemp("index") / INDEX_NAME
    value = {**before, "weight_map": weight_map, **after}
    path.write_text(f" {json.dumps(value, indent=indent, ensure_ascii=ascii_only)}\n")
    shards = read_index(path).shards
    assert {name: shard for shard, names in shards.items() for name in names} == weight_map


@given(st.text(alphabet='{}[]":, \\nweight_map1', max_size=40) | st.binary(max_size=20))
def test_any_text(tmp_path_factory: pytest.TempPathFactory, text: str | bytes) -> None:
    """Whatever a file under the index's name holds, the operator gets one line."""
    path = tmp_path_factory.mktemp("index") / INDEX_NAME
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(OperatorError) as caught:
        read_index(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ("{}", "weight_map"),
        ('{"metadata": {}}', "missing required field `weight_map`"),
        ('{"weight_map": []}', "Expected `object`, got `array`"),
        ('{"weight_map": {"a": 1}}', "Expected `str`, got `int`"),
        ('{"weight_map": {"a": "b"', "truncated"),
        ('{"weight_map": {"a": "b",}}', "trailing comma"),
        ('{"weight_map": {}', "truncated"),
        ('{"weight_map": {}} x', "trailing characters"),
        ('{"weight_map": {"a": "../b"}}', "not a file name"),
        ('{"weight_map": {"a": ""}}', "not a file name"),
        ('{"weight_map": {"a": "\\x"}}', "escape"),
        ('{"weight_map": {"a": "\\ud800 and more"}}', "surrogate"),
        ('{"weight_map": {"a": "\\udc80.safetensors"}}', "surrogate"),
        ('{"weight_map": {"a": "%s"}}' % ("s" * 256), "not a file name"),
        ('{"weight_map": {"a": "\\u001b[2J/"}}', r"'\\x1b\[2J/' is not a file name"),
        ("\ufeff{}", "byte order mark"),
    ],
)
def test_damaged(tmp_path: Path, text: str, words: str) -> None:
    """A cut or edited index, or one that leads out of the directory, must be named as such in one line."""
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(OperatorError, match=words) as caught:
        read_index(tmp_path / INDEX_NAME)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_no_regular_file(tmp_path: Path, kind: str) -> None:
    """A FIFO would be waited for and /dev/zero read until the memory ends."""
    SPECIAL_FILES[kind](tmp_path / INDEX_NAME)
    with pytest.raises(OperatorError, match=f"is damaged .it is a {kind}, not a regular file"):
        read_index(tmp_path / INDEX_NAME)


def test_too_large(tmp_path: Path) -> None:
    """A weight file under the index's name must not be read into memory."""
    with (tmp_path / INDEX_NAME).open("wb") as file:
        file.truncate(INDEX_MAX_BYTES + 1)
    with pytest.raises(OperatorError, match="larger than"):
        read_index(tmp_path / INDEX_NAME)


def test_not_utf8(tmp_path: Path) -> None:
    """Binary rubbish under the index's name must not end in a decoder's traceback."""
    (tmp_path / INDEX_NAME).write_bytes(b"\xff\xfe{}")
    with pytest.raises(OperatorError, match="is damaged"):
        read_index(tmp_path / INDEX_NAME)


@pytest.mark.parametrize(
    ("claim", "known"),
    [
        (7, 7),
        (7.0, 7),
        ("7", None),
        (True, None),
        (0.5, None),
        (None, None),
        (10**400, None),
        (1e300, None),
        (-1, None),
    ],
)
def test_total_size(tmp_path: Path, claim: object, known: int | None) -> None:
    """A size the index does not state is unknown, never zero."""
    path = tmp_path / INDEX_NAME
    path.write_text(json.dumps({"metadata": {"total_size": claim}, "weight_map": {"a": "s"}}))
    assert read_index(path).total_size == known


def test_tensor_count(tmp_path: Path) -> None:
    """Tensors are counted over all shards."""
    path = tmp_path / INDEX_NAME
    path.write_text(json.dumps({"weight_map": {"a": "s", "b": "s", "c": "t"}}))
    index = read_index(path)
    assert index.shards == {"s": ["a", "b"], "t": ["c"]}
    assert index.tensor_count == 3
