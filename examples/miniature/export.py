# SPDX-License-Identifier: Apache-2.0
"""Write a trained miniature as a Kimi-K3 checkpoint: ``python -m examples.miniature.export RUN DIRECTORY``.

Names, dtypes, configuration keys and chat template are the published checkpoint's as ``kimi-k3 checkpoint
make`` writes them; the routed experts become MXFP4 by the OCP rule, the rest bfloat16. Nothing was trained to
see: the image encoder, which the format asks for, is noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.miniature import vocabulary
from examples.miniature.model import Miniature, Sizes
from kimi_k3.checkpoint import tiny_files
from kimi_k3.checkpoint.config import KimiK3Config
from kimi_k3.checkpoint.layout import EXPERT_PROJECTIONS, TEXT_PREFIX, TensorSpec, all_tensors, expert_prefix
from kimi_k3.checkpoint.tiny import INDEX_NAME, quantize_mxfp4, shard_name

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
VISION_STD = 0.02


def model_config(sizes: Sizes, special: dict[str, int]) -> dict[str, Any]:
    """``config.json``: the tiny checkpoint's with these sizes and token ids."""
    config = tiny_files.model_config()
    tokens = {
        "bos_token_id": special["[BOS]"],
        "eos_token_id": special["<|end_of_msg|>"],
        "pad_token_id": special["[PAD]"],
    }
    text = config["text_config"]
    full = [layer + 1 for layer in sizes.full_attention]
    text |= tokens | {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "intermediate_size": sizes.dense_intermediate,
        "activation_situ_beta": sizes.situ_beta,
        "activation_situ_linear_beta": sizes.situ_linear_beta,
        "rms_norm_eps": sizes.eps,
        "q_lora_rank": sizes.q_rank,
        "kv_lora_rank": sizes.kv_rank,
        "qk_nope_head_dim": sizes.nope,
        "qk_rope_head_dim": sizes.rope,
        "v_head_dim": sizes.v_dim,
        "attn_res_block_size": sizes.block,
        "first_k_dense_replace": sizes.dense_layers,
        "num_experts": sizes.experts,
        "num_experts_per_token": sizes.top_k,
        "num_shared_experts": sizes.shared_experts,
        "moe_intermediate_size": sizes.expert_intermediate,
        "routed_expert_hidden_size": sizes.latent,
    }
    text["linear_attn_config"] |= {
        "kda_layers": [layer for layer in range(1, sizes.layers + 1) if layer not in full],
        "full_attn_layers": full,
        "num_heads": sizes.kda_heads,
        "head_dim": sizes.kda_dim,
        "short_conv_kernel_size": sizes.conv,
        "gate_lower_bound": sizes.gate_lower_bound,
    }
    config["vision_config"]["text_hidden_size"] = sizes.hidden
    return config | tokens | {"media_placeholder_token_id": special["<|media_pad|>"]}


def json_files(sizes: Sizes, merges: list[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Every JSON file but the tokenizer's and the weights' index, by name.

    An answer ends where its channel closes, not only with its message: the profile for CPUs has no parser
    that would take the closing tags' words out of the text.
    """
    special = vocabulary.special_tokens(len(merges))
    generation = {
        "bos_token_id": special["[BOS]"],
        "eos_token_id": [special["<|end_of_msg|>"], special["<|close|>"]],
        "pad_token_id": special["[PAD]"],
    }
    files = tiny_files.json_files()
    del files["tokenizer.json"]
    return files | {"config.json": model_config(sizes, special), "generation_config.json": generation}


def expert_tensors(state: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """MXFP4 codes and scales of one layer's stacked experts, by their published names."""
    named: dict[str, Tensor] = {}
    for projection in EXPERT_PROJECTIONS:
        for number, matrix in enumerate(state[f"model.layers.{layer}.block_sparse_moe.experts.{projection}"]):
            packed, scale = quantize_mxfp4(matrix.float().numpy())
            stem = f"{expert_prefix(layer, number)}.{projection}"
            named[f"{stem}.weight_packed"] = torch.from_numpy(packed)
            named[f"{stem}.weight_scale"] = torch.from_numpy(scale)
    return named


def published_tensors(state: dict[str, Tensor], config: KimiK3Config) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, by its published name and in its published dtype and shape.

    Raises:
        ValueError: a trained tensor has no place, or not the shape of its place.
    """
    trained = {f"{TEXT_PREFIX}{name}": tensor for name, tensor in state.items() if ".experts.w" not in name}
    for layer in config.text_config.moe_layers:
        trained |= expert_tensors(state, layer)
    random = torch.Generator().manual_seed(0)
    named: dict[str, Tensor] = {}
    for spec in all_tensors(config):
        if spec.name.startswith(TEXT_PREFIX):
            tensor = _fitted(trained.pop(spec.name), spec)
        else:
            tensor = torch.randn(spec.shape, generator=random) * VISION_STD
        named[spec.name] = tensor.to(DTYPES[spec.dtype]).contiguous()
    if trained:
        raise ValueError(f"{len(trained)} trained tensors have no place, such as {min(trained)}")
    return named


def _fitted(tensor: Tensor, spec: TensorSpec) -> Tensor:
    if spec.name.endswith(".A_log"):  # padded behind the heads, as in the published checkpoint
        tensor = torch.cat([tensor, tensor.new_zeros(spec.shape[0] - len(tensor))])
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(f"{spec.name} has shape {tuple(tensor.shape)}, expected {spec.shape}")
    return tensor


def export(
    state: dict[str, Tensor], sizes: Sizes, merges: list[tuple[str, str]], directory: Path
) -> dict[str, Tensor]:
    """Write the checkpoint into a new directory, and return its tensors."""
    files = json_files(sizes, merges)
    config = KimiK3Config.model_validate_json(json.dumps(files["config.json"]))
    tensors = published_tensors(state, config)
    directory.mkdir(parents=True)
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
    vocabulary.build(merges).save(str(directory / "tokenizer.json"))
    shard = shard_name(1, 1)
    save_file(tensors, directory / shard, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, shard)}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return tensors


def load_run(run: Path) -> tuple[dict[str, Tensor], Sizes, list[tuple[str, str]]]:
    """The weights, sizes and merges that a training left in its directory."""
    state: dict[str, Tensor] = {}
    for shard in sorted(run.glob("weights-*.safetensors")):
        state |= load_file(shard)
    written = json.loads((run / "log.json").read_text())["sizes"]
    sizes = Sizes(**written | {"full_attention": tuple(written["full_attention"])})
    merges = json.loads((run / "tokenizer.json").read_text())["model"]["merges"]
    Miniature(sizes).load_state_dict(state)  # complete, and nothing else
    return state, sizes, [(left, right) for left, right in merges]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="what training wrote")
    parser.add_argument("directory", type=Path, help="of the checkpoint; must not exist")
    arguments = parser.parse_args()
    state, sizes, merges = load_run(arguments.run)
    export(state, sizes, merges, arguments.directory)
    size = sum(file.stat().st_size for file in arguments.directory.iterdir())
    names = ", ".join(f"{key} {value}" for key, value in dataclasses.asdict(sizes).items() if "expert" in key)
    print(f"{arguments.directory}: {size:,} bytes; {names}")


if __name__ == "__main__":
    main()
