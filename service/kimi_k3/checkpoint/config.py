# SPDX-License-Identifier: Apache-2.0
"""The parts of a checkpoint's ``config.json`` this product relies on.

``config.json`` is a foreign file: its authors add keys with every revision and nothing here may break
because of one, so unknown keys are ignored. The keys that *are* named here decide memory, names and
shapes, so they are checked strictly: a string where a number belongs is an error, not a guess.
"""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kimi_k3.checkpoint.messages import bad_checkpoint
from kimi_k3.files import FileTooLarge, NotRegularFile, read_small

if TYPE_CHECKING:
    from pathlib import Path

#: The class name vLLM's model registry knows the multimodal Kimi-K3 under.
ARCHITECTURE = "KimiK3ForConditionalGeneration"
#: ``quantization_config.format`` of the published checkpoint (compressed-tensors).
QUANT_FORMAT = "mxfp4-pack-quantized"
#: Values per E8M0 scale (OCP Microscaling Formats 1.0, section 5.2: k = 32).
MX_GROUP_SIZE = 32
#: Bytes; the published config.json has about 7 kB, so anything near this is not a config.
CONFIG_MAX_BYTES = 4 << 20

# Limits far beyond any model, so that a nonsensical number is an error here and not, where something is
# computed from it, the end of the memory. In brackets the published config's numbers.
#: Decoder layers [93], layers of the image encoder [27], and entries of a list of layers.
LAYERS_MAX = 1_000
#: Routed or shared experts of one layer [896].
EXPERTS_MAX = 100_000
#: Routed experts of all layers together [82,432]; the inspection keeps six bytes for each.
ALL_EXPERTS_MAX = 4_000_000
#: Widths, numbers of heads, the vocabulary and whatever else counts elements [163,840].
SIZE_MAX = 1 << 24
#: Token positions [1,048,576].
POSITIONS_MAX = 1 << 31

Layers = Annotated[int, Field(gt=0, le=LAYERS_MAX)]
LayerNumbers = Annotated[tuple[Layers, ...], Field(max_length=LAYERS_MAX)]
Experts = Annotated[int, Field(gt=0, le=EXPERTS_MAX)]
Positive = Annotated[int, Field(gt=0, le=SIZE_MAX)]
NonNegative = Annotated[int, Field(ge=0, le=SIZE_MAX)]


class _Foreign(BaseModel):
    """A section of a file we do not own: known keys strict, unknown keys ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class LinearAttnConfig(_Foreign):
    """``text_config.linear_attn_config``; layer numbers count from 1."""

    kda_layers: LayerNumbers
    full_attn_layers: LayerNumbers
    num_heads: Positive
    head_dim: Positive
    short_conv_kernel_size: Positive


class QuantWeights(_Foreign):
    """``quantization_config.config_groups.*.weights``."""

    num_bits: Positive
    type: str
    group_size: Positive | None = None


class QuantGroup(_Foreign):
    """One entry of ``quantization_config.config_groups``."""

    weights: QuantWeights | None = None


class QuantizationConfig(_Foreign):
    """``quantization_config``, in ``text_config`` or at the top level."""

    quant_method: str
    format: str | None = None
    config_groups: dict[str, QuantGroup] = Field(default_factory=dict)
    ignore: tuple[str, ...] = ()


class TextConfig(_Foreign):
    """``text_config``: the decoder. Sizes are numbers of elements."""

    vocab_size: Positive
    hidden_size: Positive
    num_hidden_layers: Layers
    num_attention_heads: Positive
    intermediate_size: Positive
    max_position_embeddings: Annotated[int, Field(gt=0, le=POSITIONS_MAX)]
    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: NonNegative
    v_head_dim: Positive
    mla_use_output_gate: bool = False
    linear_attn_config: LinearAttnConfig
    attn_res_block_size: Positive | None = None
    num_experts: Experts
    num_experts_per_token: Experts
    num_shared_experts: Annotated[int, Field(ge=0, le=EXPERTS_MAX)] = 0
    moe_intermediate_size: Positive
    routed_expert_hidden_size: Positive | None = None
    latent_moe_use_norm: bool = False
    first_k_dense_replace: NonNegative = 0
    moe_layer_freq: Positive = 1
    quantization_config: QuantizationConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Every layer has exactly one kind of attention, and MXFP4 groups divide the experts' widths."""
        kda = set(self.linear_attn_config.kda_layers)
        full = set(self.linear_attn_config.full_attn_layers)
        if both := sorted(kda & full):
            raise ValueError(f"layer {both[0]} is in both kda_layers and full_attn_layers")
        # A checkpoint cut to its first layers may keep the full lists, so larger numbers are allowed.
        if lost := sorted(set(range(1, self.num_hidden_layers + 1)) - kda - full):
            raise ValueError(f"layer {lost[0]} is in neither kda_layers nor full_attn_layers")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError("num_experts_per_token is larger than num_experts")
        if (experts := len(self.moe_layers) * self.num_experts) > ALL_EXPERTS_MAX:
            raise ValueError(
                f"{experts:,} routed experts in all layers, at most {ALL_EXPERTS_MAX:,} are possible"
            )
        for name, width in (
            ("expert hidden", self.expert_hidden),
            ("moe_intermediate", self.moe_intermediate_size),
        ):
            if width % MX_GROUP_SIZE:
                raise ValueError(f"{name} size {width} is not a multiple of {MX_GROUP_SIZE}")
        return self

    @property
    def expert_hidden(self) -> int:
        """Input and output width of a routed expert: the latent width, or the model's."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based numbers of the layers with linear (KDA) attention."""
        kda = set(self.linear_attn_config.kda_layers)
        return tuple(layer for layer in range(self.num_hidden_layers) if layer + 1 in kda)

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based numbers of the layers with full (MLA) attention."""
        kda = set(self.linear_attn_config.kda_layers)
        return tuple(layer for layer in range(self.num_hidden_layers) if layer + 1 not in kda)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based numbers of the layers with routed experts (the rule of vLLM's ``KimiDecoderLayer``)."""
        return tuple(
            layer
            for layer in range(self.first_k_dense_replace, self.num_hidden_layers)
            if layer % self.moe_layer_freq == 0
        )

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """0-based numbers of the layers with a plain MLP."""
        moe = set(self.moe_layers)
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in moe)


class VisionConfig(_Foreign):
    """``vision_config``: what decides the size of the image encoder."""

    patch_size: Positive = 14
    init_pos_emb_height: Positive = 64
    init_pos_emb_width: Positive = 64
    vt_num_hidden_layers: Layers = 27
    vt_hidden_size: Positive = 1024
    vt_intermediate_size: Positive = 4096
    qkv_hidden_size: Positive = 1536
    merge_kernel_size: tuple[Positive, Positive] = (2, 2)


class KimiK3Config(_Foreign):
    """``config.json`` of a Kimi-K3 checkpoint."""

    architectures: tuple[str, ...]
    text_config: TextConfig
    vision_config: VisionConfig | None = None
    quantization_config: QuantizationConfig | None = None

    @property
    def quantization(self) -> QuantizationConfig | None:
        """The quantisation in force; the published checkpoint keeps it in ``text_config``."""
        return self.text_config.quantization_config or self.quantization_config


def _first_error(error: ValidationError) -> str:
    """``text_config.hidden_size: Input should be a valid integer (and 2 more)``.

    What is wrong with the file as a whole has no place: ``Invalid JSON: ...``.
    """
    first, *rest = error.errors(include_url=False, include_context=False)
    place = ".".join(f"{part!s:.200}" for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    more = f" (and {len(rest)} more)" if rest else ""
    return f"{place}: {message}{more}" if place else f"{message}{more}"


def parse_config(raw: bytes, *, where: str) -> KimiK3Config:
    """Parse the bytes of a ``config.json``.

    Args:
        raw: the file's bytes.
        where: the file's path, for messages.

    Raises:
        OperatorError: not JSON, another architecture, another quantisation, or a wrong value.
    """
    fetch = "download config.json again from the model's repository"
    if raw.startswith(codecs.BOM_UTF8):
        # Accepted here it would only fail later: vLLM's reader of config.json does not take one either.
        raise bad_checkpoint(
            f"{where} begins with a UTF-8 byte order mark (BOM), which JSON does not allow",
            "save it without one or download it again from the model's repository",
        )
    try:
        # Decoded here: given bytes, ``json`` would guess UTF-16 and UTF-32, too.
        found = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise bad_checkpoint(f"{where} is not valid JSON ({error})", fetch) from None
    if not isinstance(found, dict):
        raise bad_checkpoint(f"{where} does not hold a JSON object", fetch)
    # First the architecture, so that another model is called by its name and not by a list of lost keys.
    names = found.get("architectures")
    if not isinstance(names, list) or ARCHITECTURE not in names:
        listed = ", ".join(name for name in names if isinstance(name, str)) if isinstance(names, list) else ""
        have = f"has architecture {listed:.200}" if listed else "names no architecture"
        raise bad_checkpoint(f"{where} {have}, expected {ARCHITECTURE}", "point at a Kimi-K3 checkpoint")
    try:
        config = KimiK3Config.model_validate_json(raw)
    except ValidationError as error:
        raise bad_checkpoint(f"{where}: {_first_error(error)}", fetch) from None
    quantization = config.quantization
    if quantization is None:
        raise bad_checkpoint(
            f"{where} has no quantization_config, expected format {QUANT_FORMAT}",
            "use the published MXFP4 checkpoint",
        )
    if quantization.format != QUANT_FORMAT:
        have = quantization.format or quantization.quant_method
        raise bad_checkpoint(
            f"{where} has quantisation format {have:.200}, expected {QUANT_FORMAT}",
            "use the published MXFP4 checkpoint",
        )
    for name, group in quantization.config_groups.items():
        weights = group.weights
        if weights is not None and (weights.num_bits, weights.group_size) != (4, MX_GROUP_SIZE):
            raise bad_checkpoint(
                f"{where}: quantization_config.config_groups.{name:.200} has {weights.num_bits} bits in "
                f"groups of {weights.group_size}, expected 4 bits in groups of {MX_GROUP_SIZE}",
                "use the published MXFP4 checkpoint",
            )
    return config


def read_config(path: Path) -> KimiK3Config:
    """Read and parse the ``config.json`` at ``path``.

    Raises:
        OperatorError: unreadable, no regular file, too large to be a config, or anything
            :func:`parse_config` refuses.
    """
    try:
        raw = read_small(path, limit=CONFIG_MAX_BYTES)
    except (NotRegularFile, FileTooLarge) as error:
        raise bad_checkpoint(
            f"{path} is no config ({error.strerror})", "download config.json again"
        ) from None
    except OSError as error:
        raise bad_checkpoint(
            f"{path} cannot be read ({error.strerror})", "check the path and its permissions"
        ) from None
    return parse_config(raw, where=str(path))
