# SPDX-License-Identifier: Apache-2.0
"""config.json: what is accepted, and how the rest is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.checkpoint.config import CONFIG_MAX_BYTES, parse_config, read_config
from kimi_k3.checkpoint.tiny_files import model_config
from kimi_k3.errors import ExitCode, OperatorError

from .imitation import published_config

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


def test_too_large(tmp_path: Path) -> None:
    """A weight file under the config's name must not be read into memory."""
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(CONFIG_MAX_BYTES + 1)
    with pytest.raises(OperatorError, match="larger than"):
        read_config(tmp_path / "config.json")
