# SPDX-License-Identifier: Apache-2.0
"""config.json: what is accepted, and how the rest is refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.checkpoint.config import CONFIG_MAX_BYTES, LAYERS_MAX, TextConfig, parse_config, read_config
from kimi_k3.checkpoint.tiny_files import model_config
from kimi_k3.errors import ExitCode, OperatorError

from .imitation import FOREIGN, SPECIAL_FILES, published_config

if TYPE_CHECKING:
    from pathlib import Path


def changed(*path: str, value: Any) -> bytes:
    """The tiny config with the value at ``path`` replaced."""
    document = model_config()
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(document).encode()


def test_published() -> None:
    """The one checkpoint this product exists for must be understood."""
    text = published_config().text_config
    assert (text.num_hidden_layers, text.num_experts, text.num_experts_per_token) == (93, 896, 16)
    assert text.expert_hidden == 3584


def test_unknown_keys() -> None:
    """config.json is a foreign file; a key added upstream must not stop a service."""
    raw = changed("text_config", "a_new_key", value={"x": 1})
    assert parse_config(raw, where="c").text_config.hidden_size == 256


def test_cut_to_first_layers() -> None:
    """A checkpoint cut to its first layers keeps the full layer lists; vLLM accepts that, so do we."""
    text = parse_config(changed("text_config", "num_hidden_layers", value=4), where="c").text_config
    assert (text.kda_layers, text.mla_layers) == ((0, 1, 2), (3,))


def test_quantization_at_top_level() -> None:
    """vLLM reads quantization_config from either place."""
    document = model_config()
    document["quantization_config"] = document["text_config"].pop("quantization_config")
    config = parse_config(json.dumps(document).encode(), where="c")
    assert config.quantization is not None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("architectures",), ["LlamaForCausalLM"], "has architecture LlamaForCausalLM, expected KimiK3For"),
        (("architectures",), [], "names no architecture"),
        (("architectures",), "KimiK3ForConditionalGeneration", "names no architecture"),
        (("text_config",), None, "text_config"),
        (("text_config", "num_experts"), "896", "text_config.num_experts: Input should be a valid integer"),
        (("text_config", "hidden_size"), 0, "text_config.hidden_size: Input should be greater than 0"),
        (("text_config", "moe_intermediate_size"), 100, "not a multiple of 32"),
        (("text_config", "num_experts_per_token"), 17, "larger than num_experts"),
        (("text_config", "linear_attn_config", "kda_layers"), [1, 2, 3, 4, 5, 6, 7], "layer 4 is in both"),
        (("text_config", "linear_attn_config", "kda_layers"), [1, 2, 3, 5, 6], "layer 7 is in neither"),
        (("text_config", "quantization_config"), None, "no quantization_config"),
        (
            ("text_config", "quantization_config", "format"),
            "pack-quantized",
            "format pack-quantized, expected mxfp4",
        ),
        (("text_config", "quantization_config", "format"), None, "format compressed-tensors, expected mxfp4"),
        (
            ("text_config", "quantization_config", "config_groups", "group_0", "weights", "group_size"),
            128,
            "4 bits in groups of 128, expected 4 bits in groups of 32",
        ),
    ],
)
def test_refused(path: tuple[str, ...], value: Any, words: str) -> None:
    """Each wrong value is named by its place, in one line, before anything is computed from it."""
    with pytest.raises(OperatorError) as caught:
        parse_config(changed(*path, value=value), where="/m/config.json")
    line = str(caught.value)
    assert words in line
    assert line.startswith("/m/config.json")
    assert "\n" not in line
    assert caught.value.exit_code is ExitCode.BAD_CHECKPOINT


@given(
    st.binary(max_size=60)
    | st.recursive(st.none(), lambda x: st.lists(x), max_leaves=5).map(lambda v: json.dumps(v).encode())
)
def test_any_bytes(raw: bytes) -> None:
    """Whatever is in the file, the operator gets one line."""
    with pytest.raises(OperatorError) as caught:
        parse_config(raw, where="c")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("digits", [10, 13, 400, 5000])
@pytest.mark.parametrize(
    "path",
    [
        *[
            ("text_config", name)
            for name, field in TextConfig.model_fields.items()
            if re.search(r"\bint\b", str(field.annotation))
        ],
        ("text_config", "linear_attn_config", "num_heads"),
        ("text_config", "linear_attn_config", "head_dim"),
        ("vision_config", "vt_num_hidden_layers"),
        ("vision_config", "vt_hidden_size"),
    ],
    ids=".".join,
)
def test_nonsensical_numbers(path: tuple[str, ...], digits: int) -> None:
    """A number of layers or experts that is nonsense must not be counted up to: that ends the memory."""
    # Python does not write a number of 5000 digits.
    raw = changed(*path, value="number").replace(b'"number"', b"9" * digits)
    assert len(refusal(raw)) < 300


def refusal(raw: bytes) -> str:
    """The line an operator gets for this config, checked to be one that can be printed."""
    with pytest.raises(OperatorError) as caught:
        parse_config(raw, where="c")
    line = str(caught.value)
    assert line.isprintable()
    assert caught.value.exit_code is ExitCode.BAD_CHECKPOINT
    return line


def test_limits_leave_room() -> None:
    """The limits are there for nonsense: a model ten times the published one in one respect must pass."""
    for path, value in (
        (("text_config", "max_position_embeddings"), 1 << 31),
        (("text_config", "vocab_size"), 1 << 24),
        (("text_config", "num_experts"), 100_000),
    ):
        parse_config(changed(*path, value=value), where="c")


def test_long_layer_lists() -> None:
    """Every layer is looked up in these lists, so their length is bounded, too."""
    raw = changed("text_config", "linear_attn_config", "kda_layers", value=[1] * (LAYERS_MAX + 1))
    assert "text_config.linear_attn_config.kda_layers: Tuple should have at most 1000 items" in refusal(raw)


def test_experts_of_all_layers() -> None:
    """Layers and experts may each be possible and yet make a product that no memory holds."""
    document = model_config()
    text = document["text_config"]
    text["linear_attn_config"]["kda_layers"] = [n for n in range(1, LAYERS_MAX + 1) if n not in (4, 8)]
    text.update(num_hidden_layers=LAYERS_MAX, num_experts=100_000)
    assert "99,900,000 routed experts in all layers" in refusal(json.dumps(document).encode())


def test_byte_order_mark() -> None:
    """vLLM does not read a config with a BOM; hearing so now is better than when its start fails."""
    line = refusal(b"\xef\xbb\xbf" + json.dumps(model_config()).encode())
    assert line.startswith("c begins with a UTF-8 byte order mark (BOM)")
    assert "save it without one" in line


def test_other_encodings() -> None:
    """The standard library guesses UTF-16 where the second parser and vLLM do not."""
    assert "is not valid JSON" in refusal(json.dumps(model_config()).encode("utf-16"))


def test_errors_without_a_place() -> None:
    """What only the second parser refuses concerns the whole file; no empty place may stand before it."""
    assert refusal(changed("a_new_key", value="\ud800")).startswith("c: Invalid JSON: ")


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_text(text: str) -> None:
    """Text from the file must neither steer the terminal, nor forge a line, nor fail to be encoded."""
    assert "expected KimiK3For" in refusal(changed("architectures", value=[text, 5, {}]))
    refusal(changed("text_config", "quantization_config", "format", value=text))
    refusal(changed("text_config", "quantization_config", "config_groups", value={text: {"weights": 5}}))
    groups = {text * 1000: {"weights": {"num_bits": 8, "type": "float"}}}
    assert len(refusal(changed("text_config", "quantization_config", "config_groups", value=groups))) < 2500


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_no_regular_file(tmp_path: Path, kind: str) -> None:
    """A FIFO would be waited for and /dev/zero read until the memory ends."""
    SPECIAL_FILES[kind](tmp_path / "config.json")
    with pytest.raises(OperatorError, match=f"is no config .it is a {kind}, not a regular file.;") as caught:
        read_config(tmp_path / "config.json")
    assert caught.value.exit_code is ExitCode.BAD_CHECKPOINT


def test_too_large(tmp_path: Path) -> None:
    """A weight file under the config's name must not be read into memory."""
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(CONFIG_MAX_BYTES + 1)
    with pytest.raises(OperatorError, match="larger than"):
        read_config(tmp_path / "config.json")
