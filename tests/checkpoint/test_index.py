# SPDX-License-Identifier: Apache-2.0
"""The streaming index reader against the standard library's JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.checkpoint.index import INDEX_MAX_BYTES, INDEX_NAME, names_of, parse_index, read_index
from kimi_k3.errors import OperatorError

from .imitation import SPECIAL_FILES

if TYPE_CHECKING:
    from pathlib import Path

maps = st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=6)
others = st.dictionaries(
    st.text(max_size=5).filter(lambda key: key != "weight_map"),
    st.none() | st.integers() | st.text(max_size=5) | st.lists(st.booleans(), max_size=3),
    max_size=3,
)


def parsed(text: str) -> tuple[dict[str, object], dict[str, str]]:
    """The other keys and the weight map."""
    found: dict[str, str] = {}
    return parse_index(text, found.__setitem__), found


@given(maps, others, others, st.sampled_from([None, 2]), st.booleans())
def test_same_as_json(
    weight_map: dict[str, str],
    before: dict[str, object],
    after: dict[str, object],
    indent: int | None,
    ascii_only: bool,
) -> None:
    """The index is walked by our own scanner for its memory; it must not read anything differently."""
    value = {**before, "weight_map": weight_map, **after}
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    rest, found = parsed(f" {text}\n")
    assert found == weight_map
    assert rest == {key: item for key, item in value.items() if key != "weight_map"}


@given(st.text(alphabet='{}[]":, \\nweight_map1', max_size=40) | st.text(max_size=20))
def test_any_text(text: str) -> None:
    """Text the standard library refuses must be refused here too, and only by ValueError."""
    try:
        parsed(text)
    except (ValueError, RecursionError):
        return
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("{}", "no key"),
        ('{"metadata": {}}', "no weight_map"),
        ('{"weight_map": []}', "not an object"),
        ('{"weight_map": {"a": 1}}', "no pair of strings"),
        ('{"weight_map": {"a": "b"', "no pair of strings"),
        ('{"weight_map": {"a": "b",}}', "no pair of strings"),
        ('{"weight_map": {}', "neither comma nor brace"),
        ('{"weight_map": {}} x', "behind its end"),
        ('{"weight_map": {"a": "../b"}}', "not a file name"),
        ('{"weight_map": {"a": ""}}', "not a file name"),
        ('{"weight_map": {"a": "\\x"}}', "escape"),
        ('{"weight_map": {"a": "\\ud800"}}', r"'\\ud800' is not a file name"),
        ('{"weight_map": {"a": "\\udc80.safetensors"}}', "not a file name"),
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
    with pytest.raises(OperatorError, match="UTF-8"):
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


def test_names_come_back(tmp_path: Path) -> None:
    """Only hashes are kept, so the names for a message must be found again."""
    path = tmp_path / INDEX_NAME
    path.write_text(json.dumps({"weight_map": {"a": "s", "b": "s", "c": "t"}}))
    index = read_index(path)
    assert index.tensor_count == 3
    assert names_of(path, set(index.shards["s"]), limit=5) == ["a", "b"]
    assert names_of(path, set(index.shards["s"]), limit=1) == ["a"]
