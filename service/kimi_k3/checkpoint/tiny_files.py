# SPDX-License-Identifier: Apache-2.0
"""The JSON files of the tiny checkpoint: config, tokenizer, chat template, image preprocessor.

The keys are those of the published Kimi-K3 checkpoint, the sizes as small as vLLM's code allows.
"""

from __future__ import annotations

from typing import Any

from kimi_k3.checkpoint.config import ARCHITECTURE, MX_GROUP_SIZE, QUANT_FORMAT

#: One token per byte, id = byte.
BYTES = 256
#: Merges that give a few common pieces of English; each adds one token. ``Ġ`` is byte-level BPE's space.
MERGES = (
    ("Ġ", "t"), ("Ġ", "a"), ("h", "e"), ("i", "n"), ("r", "e"), ("o", "n"), ("e", "r"), ("Ġt", "he"),
    ("Ġ", "s"), ("a", "t"), ("Ġ", "w"), ("Ġ", "o"), ("e", "n"), ("Ġ", "c"), ("i", "t"), ("i", "s"),
    ("a", "n"), ("o", "r"), ("e", "s"), ("Ġ", "b"), ("e", "d"), ("Ġ", "f"), ("in", "g"), ("Ġ", "p"),
    ("o", "u"), ("Ġa", "n"), ("a", "l"), ("a", "r"), ("Ġt", "o"), ("Ġo", "f"), ("Ġ", "in"), ("Ġan", "d"),
)  # fmt: skip
VOCAB_SIZE = 320
_FIRST_SPECIAL = BYTES + len(MERGES)
#: In the published vocabulary, too, the special tokens end it: pad is its last token, the others its first.
SPECIAL_TOKENS = {
    "[BOS]": _FIRST_SPECIAL,
    "[EOS]": _FIRST_SPECIAL + 1,
    "<|end_of_msg|>": _FIRST_SPECIAL + 2,
    "<|open|>": _FIRST_SPECIAL + 3,
    "<|close|>": _FIRST_SPECIAL + 4,
    "<|sep|>": _FIRST_SPECIAL + 5,
    "<|media_pad|>": _FIRST_SPECIAL + 6,
    **{f"<|reserved_token_{token}|>": token for token in range(_FIRST_SPECIAL + 7, VOCAB_SIZE - 1)},
    "[PAD]": VOCAB_SIZE - 1,
}
BOS, EOS, PAD = SPECIAL_TOKENS["[BOS]"], SPECIAL_TOKENS["<|end_of_msg|>"], SPECIAL_TOKENS["[PAD]"]

MAX_POSITIONS = 4096
LAYERS = 8
HEADS = 2
#: Every fourth layer is full attention, as in the published config; layer numbers count from 1.
MLA_LAYERS = (4, 8)

#: The message format vLLM's Kimi-K3 reasoning and tool parsers read. Unlike the published encoder, thinking
#: is off unless asked for: a model of noise would never close its thoughts and every answer would be empty.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{%- set text = message.content -%}
{%- else -%}{%- set text = (message.content or []) | selectattr('type', 'equalto', 'text') \
| map(attribute='text') | join('') -%}
{%- endif -%}
{%- if message.role == 'assistant' -%}
{{- '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>' + text \
+ '<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>' -}}
{%- elif message.role in ('system', 'user', 'tool') -%}
{{- '<|open|>message role="' + message.role + '"<|sep|>' + text + '<|close|>message<|sep|><|end_of_msg|>' -}}
{%- else -%}
{{- raise_exception('unknown role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|open|>message role="assistant"<|sep|><|open|>' -}}
{{- 'think' if thinking is defined and thinking else 'response' -}}{{- '<|sep|>' -}}
{%- endif -%}
"""


def model_config() -> dict[str, Any]:
    """``config.json``."""
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": QUANT_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": QUANT_FORMAT,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": MX_GROUP_SIZE,
                    "scale_dtype": "torch.uint8",
                    "dynamic": False,
                    "observer": "minmax",
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": 128,
        "intermediate_size": 1024,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-05,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "max_position_embeddings": MAX_POSITIONS,
        "q_lora_rank": 128,
        # vLLM's CPU MLA kernel exists for the real widths only: 512 + 64.
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in MLA_LAYERS],
            "full_attn_layers": list(MLA_LAYERS),
            "num_heads": HEADS,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "attn_res_block_size": 3,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 128,
        # Not in the published config: without it vLLM pads the experts to 256 columns per rank.
        "min_moe_intermediate_per_partition": 64,
        "routed_expert_hidden_size": 128,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        **tokens,
        "dtype": "bfloat16",
        "quantization_config": quantization,
    }
    vision = {
        "model_type": "kimi_k3_vision",
        "patch_size": 14,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 1,
        "vt_hidden_size": 64,
        "vt_intermediate_size": 128,
        "qkv_hidden_size": 64,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmergerv2",
        "mm_hidden_size": 64,
        "text_hidden_size": 256,
        "norm_type": "rmsnorm",
        "mlp_type": "mlp2",
        "attn_bias": False,
        "activation_func": "gelu_pytorch_tanh",
    }
    return {
        "model_type": "kimi_k3",
        "architectures": [ARCHITECTURE],
        "dtype": "bfloat16",
        "media_placeholder_token_id": SPECIAL_TOKENS["<|media_pad|>"],
        "ignore_index": -100,
        **tokens,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }


def byte_alphabet() -> list[str]:
    """The character byte-level BPE writes for each byte: itself if visible, else from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (chr(0x100 + number) for number in range(BYTES))
    return [chr(byte) if byte in visible else next(hidden) for byte in range(BYTES)]


def printable_tokens() -> list[int]:
    """Ids whose text is printable ASCII: bytes 0x20..0x7e and all merged pieces."""
    return [*range(0x20, 0x7F), *range(BYTES, BYTES + len(MERGES))]


def tokenizer() -> dict[str, Any]:
    """``tokenizer.json`` of the ``tokenizers`` library: byte-level BPE, no Python code."""
    pieces = [*byte_alphabet(), *("".join(pair) for pair in MERGES)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, number in SPECIAL_TOKENS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: number for number, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in MERGES],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "pad_token": "[PAD]",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config() -> dict[str, Any]:
    """``generation_config.json``."""
    return {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def preprocessor_config() -> dict[str, Any]:
    """``preprocessor_config.json``: the keys vLLM's Kimi image processor reads."""
    return {
        "media_proc_cfg": {
            "in_patch_limit": 256,
            "patch_size": 14,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 16,
            "in_patch_limit_each_frame": 256,
            "in_patch_limit_video": 1024,
            "temporal_merge_kernel_size": 4,
            "sample_fps": 2.0,
            "max_num_frames_each_video": None,
        }
    }


def json_files() -> dict[str, dict[str, Any]]:
    """Every JSON file but the weights' index, by name."""
    return {
        "config.json": model_config(),
        "generation_config.json": generation_config(),
        "preprocessor_config.json": preprocessor_config(),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(),
    }
