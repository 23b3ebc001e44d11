# SPDX-License-Identifier: Apache-2.0
"""The computed layout against the published checkpoint's figures."""

from __future__ import annotations

from collections import Counter

from kimi_k3.checkpoint.config import KimiK3Config
from kimi_k3.checkpoint.layout import all_tensors, expert_shape, layer_tensors

from .imitation import published_config

# Published with the checkpoint, revision f831ab66814297da540d832a5235f8e904f29d06.
TENSORS = 497_220
BYTES = 1_560_860_324_864
ELEMENTS = {"BF16": 57_179_884_544, "F32": 11_122_432}
FP4_VALUES = 2_722_740_830_208


def test_published_figures() -> None:
    """One wrong name, dtype or shape in the layout would refuse the real checkpoint or miss a hole in it."""
    count, size = 0, 0
    elements: Counter[str] = Counter()
    packed = 0
    for spec in all_tensors(published_config()):
        count += 1
        size += spec.nbytes
        elements[spec.dtype] += spec.elements
        packed += spec.elements if spec.name.endswith(".weight_packed") else 0
    assert (count, size) == (TENSORS, BYTES)
    assert {dtype: elements[dtype] for dtype in ELEMENTS} == ELEMENTS
    assert packed * 2 == FP4_VALUES


def test_published_expert() -> None:
    """Memory plans start from one expert's bytes: 3072 x 3584 values, three times, in 4.25 bits."""
    shape = expert_shape(published_config().text_config)
    assert shape.specs["w1", "weight_packed"] == ("U8", (3072, 1792))
    assert shape.specs["w3", "weight_scale"] == ("U8", (3072, 112))
    assert shape.specs["w2", "weight_packed"] == ("U8", (3584, 1536))
    assert shape.specs["w2", "weight_scale"] == ("U8", (3584, 96))
    assert shape.nbytes == 3 * 3072 * 3584 * 17 // 32


def test_published_layers() -> None:
    """Layers count from 1 in config.json and from 0 in tensor names; mixing them up must not go unseen."""
    text = published_config().text_config
    assert len(text.kda_layers) == 69
    assert text.mla_layers == (*range(3, 92, 4), 92)
    assert text.dense_layers == (0,)
    assert text.moe_layers == tuple(range(1, 93))


def test_a_log_is_padded() -> None:
    """The published A_log has 128 entries for 96 heads; a reader that trusts num_heads would reject it."""
    specs = {
        spec.name.rsplit("self_attn.", 1)[-1]: spec
        for spec in layer_tensors(published_config().text_config, 1)
    }
    assert (specs["A_log"].dtype, specs["A_log"].shape) == ("F32", (128,))
    assert specs["dt_bias"].shape == (96 * 128,)


def test_names_are_unique() -> None:
    """Two tensors of one name would make one of them unreachable."""
    config: KimiK3Config = published_config()
    text = config.text_config.model_copy(update={"num_experts": 2, "num_hidden_layers": 8})
    names = [spec.name for spec in all_tensors(config.model_copy(update={"text_config": text}))]
    assert len(names) == len(set(names))
