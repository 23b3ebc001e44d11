# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint: right format, right numbers, all or nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.checkpoint import make_tiny_checkpoint, require_servable, tiny, tiny_files
from kimi_k3.checkpoint.headers import read_shard
from kimi_k3.checkpoint.index import INDEX_NAME
from kimi_k3.errors import OperatorError

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MEBI = 1 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny checkpoint for all tests that only read it."""
    directory = tmp_path_factory.mktemp("tiny") / "k3"
    make_tiny_checkpoint(directory)
    return directory


def tensor(directory: Path, name: str) -> Any:
    """One tensor as numpy sees it: float32, uint8, or bfloat16 widened to float32."""
    shard = json.loads((directory / INDEX_NAME).read_text())["weight_map"][name]
    header = read_shard(directory / shard)
    entry = next(entry for entry in header.tensors if entry.name == name)
    raw = (directory / shard).read_bytes()[8 + header.header_bytes + entry.start :][: entry.nbytes]
    if entry.dtype == "BF16":
        wide = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(entry.shape)
    return np.frombuffer(raw, {"F32": "<f4", "U8": "u1"}[entry.dtype]).reshape(entry.shape)


def test_is_a_servable_checkpoint(made: Path) -> None:
    """The embedded engine goes through the same gate as the real checkpoint."""
    found = require_servable(made)
    assert found.problems == ()
    assert len(found.shards) == tiny.SHARDS
    assert sum(path.stat().st_size for path in made.iterdir()) < 16 * MEBI


def test_same_seed_same_bytes(made: Path, tmp_path: Path) -> None:
    """Recorded outputs stay valid only if the weights do; another seed must really be another model."""
    make_tiny_checkpoint(tmp_path / "again")
    make_tiny_checkpoint(tmp_path / "other", seed=1)
    for path in sorted(made.iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    shard = tiny.shard_name(1, tiny.SHARDS)
    assert (made / shard).read_bytes() != (tmp_path / "other" / shard).read_bytes()


def test_only_printable_tokens_have_logits(made: Path) -> None:
    """Answers are shown to people and must not end early: other tokens, end of text included, score zero."""
    rows = np.abs(tensor(made, "language_model.lm_head.weight")).sum(axis=1)
    assert np.flatnonzero(rows).tolist() == tiny_files.printable_tokens()
    assert rows[tiny_files.EOS] == 0


def test_weights_are_finite(made: Path) -> None:
    """One infinity or NaN would spread to every logit."""
    weight_map = json.loads((made / INDEX_NAME).read_text())["weight_map"]
    for name in weight_map:
        if not name.endswith((".weight_packed", ".weight_scale")):
            assert np.isfinite(tensor(made, name)).all(), name


def test_zero_groups(made: Path) -> None:
    """Reports count groups without values; the checkpoint must have some, and only where intended."""
    prefix = "language_model.model.layers.1.block_sparse_moe.experts"
    scales = tensor(made, f"{prefix}.0.w1.weight_scale")
    assert (scales[:8, 0] == 0).all()
    assert np.count_nonzero(scales == 0) == 8
    assert (tensor(made, f"{prefix}.0.w1.weight_packed")[:8, :16] == 0).all()
    assert np.count_nonzero(tensor(made, f"{prefix}.1.w1.weight_scale") == 0) == 0


def dequantize(packed: Any, scale: Any) -> Any:
    """MXFP4 back to float64, written apart from the quantiser."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
    return values * np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=1)


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=32, max_size=32))
def test_quantizer_is_nearest(row: list[float]) -> None:
    """Every value goes to a nearest multiple of the group's scale, and the scale is OCP's."""
    values = np.array([row], dtype=np.float32)
    packed, scale = tiny.quantize_mxfp4(values)
    amax = np.abs(values).max()
    if amax >= 2.0**-124:
        assert scale[0, 0] == np.floor(np.log2(np.float64(amax))) - 2 + 127
    unit = 2.0 ** (int(scale[0, 0]) - 127)
    distance = np.abs(np.abs(values.astype(float))[0, :, None] - E2M1 * unit).min(axis=1)
    assert (np.abs(dequantize(packed, scale) - values)[0] <= distance).all()


def test_quantizer_ties_and_nibbles() -> None:
    """Halfway values go to the even code, and the even column is the low nibble, as vLLM unpacks it."""
    row = [4.0, 0.25, -0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.1, *[0.0] * 23]
    packed, scale = tiny.quantize_mxfp4(np.array([row], dtype=np.float32))
    assert scale.tolist() == [[127]]
    assert packed[0, :5].tolist() == [0x06, 0x2A, 0x44, 0x66, 0x08]


def test_bfloat16_rounds_to_even() -> None:
    """Halfway between two bfloat16 values the even one wins, as in torch."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000], dtype=np.uint32)
    assert tiny.bfloat16_bits(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


def test_tokens_agree_with_config(made: Path) -> None:
    """vLLM takes special tokens from config.json and from the tokenizer; they must be the same ones."""
    config = json.loads((made / "config.json").read_text())
    tokens = json.loads((made / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokens["added_tokens"]}
    assert config["eos_token_id"] == special["<|end_of_msg|>"]
    assert config["media_placeholder_token_id"] == special["<|media_pad|>"]
    ids = sorted([*tokens["model"]["vocab"].values(), *special.values()])
    assert ids == list(range(config["text_config"]["vocab_size"]))
    for first, second in tokens["model"]["merges"]:
        assert {first, second, first + second} <= set(tokens["model"]["vocab"])


@given(st.text(max_size=40))
def test_tokenizer_round_trip(text: str) -> None:
    """Any text must survive encoding: prompts are bytes to this model."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tiny_files.tokenizer()))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("thinking", "opened"),
    [({}, "response"), ({"thinking": True}, "think"), ({"thinking": False}, "response")],
)
def test_chat_template(thinking: dict[str, bool], opened: str) -> None:
    """Roles, plain and part-wise content, and the thinking switch render as vLLM's parsers expect."""
    jinja2 = pytest.importorskip("jinja2")
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c"},
    ]
    template = jinja2.Template(tiny_files.CHAT_TEMPLATE)
    assert template.render(messages=messages, add_generation_prompt=True, **thinking) == (
        '<|open|>message role="system"<|sep|>S<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>ab<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|><|close|>response<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="user"<|sep|>c<|close|>message<|sep|><|end_of_msg|>'
        f'<|open|>message role="assistant"<|sep|><|open|>{opened}<|sep|>'
    )


def test_empty_directory_is_taken(tmp_path: Path) -> None:
    """A volume mounted for the checkpoint exists already and is empty."""
    (tmp_path / "k3").mkdir()
    make_tiny_checkpoint(tmp_path / "k3")
    assert (tmp_path / "k3" / "config.json").exists()


@pytest.mark.parametrize("occupied", ["directory", "file"])
def test_never_overwrites(tmp_path: Path, occupied: str) -> None:
    """A wrong path must not cost anyone a real checkpoint."""
    target = tmp_path / "k3"
    if occupied == "directory":
        target.mkdir()
        (target / "precious").touch()
    else:
        target.touch()
    with pytest.raises(OperatorError, match="exists and is not an empty directory; name a new directory"):
        make_tiny_checkpoint(target)
    assert [path.name for path in tmp_path.iterdir()] == ["k3"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "write_text", "open", "rename"])
def test_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    """A full or read-only disk is one line, and no half-written checkpoint stays to be served."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fail)
        with pytest.raises(OperatorError, match=r"cannot be written \(no room\); free some space"):
            make_tiny_checkpoint(tmp_path / "k3")
    assert list(tmp_path.iterdir()) == []


def test_without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar's image has no numpy; asking for a tiny checkpoint there is a line, not an ImportError."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(OperatorError, match=r"needs numpy.*; install"):
        make_tiny_checkpoint(tmp_path / "k3")
