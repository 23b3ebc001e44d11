# SPDX-License-Identifier: Apache-2.0
"""The parts of a checkpoint's ``config.json`` this product relies on.

``config.json`` is a foreign file: its authors add keys with every revision and nothing here may break
because of one, so unknown keys are ignored. The keys that *are* named here decide memory, names and
shapes, so they are checked strictly: a string where a number belongs is an error, not a guess.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kimi_k3.errors import ExitCode, OperatorError

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

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


class _Foreign(BaseModel):
    """A section of a file we do not own: known keys strict, unknown keys ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class LinearAttnConfig(_Foreign):
    """``text_config.linear_attn_config``; layer numbers count from 1."""

    kda_layers: tuple[Positive, ...]
    full_attn_layers: tuple[Positive, ...]
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
    num_hidden_layers: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    max_position_embeddings: Positive
    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: NonNegative
    v_head_dim: Positive
    mla_use_output_gate: bool = False
    linear_attn_config: LinearAttnConfig
    attn_res_block_size: Positive | None = None
    num_experts: Positive
    num_experts_per_token: Positive
    num_shared_experts: NonNegative = 0
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
    vt_num_hidden_layers: Positive = 27
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


def _bad(what: str, remedy: str) -> OperatorError:
    return OperatorError(what, remedy=remedy, exit_code=ExitCode.BAD_CHECKPOINT)


def _first_error(error: ValidationError) -> str:
    """``text_config.hidden_size: Input should be a valid integer (and 2 more)``."""
    first, *rest = error.errors(include_url=False, include_context=False)
    place = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    more = f" (and {len(rest)} more)" if rest else ""
    return f"{place}: {message}{more}"


def parse_config(raw: bytes, *, where: str) -> KimiK3Config:
    """Parse the bytes of a ``config.json``.

    Args:
        raw: the file's bytes.
        where: the file's path, for messages.

    Raises:
        OperatorError: not JSON, another architecture, another quantisation, or a wrong value.
    """
    fetch = "download config.json again from the model's repository"
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _bad(f"{where} is not valid JSON ({error})", fetch) from None
    if not isinstance(found, dict):
        raise _bad(f"{where} does not hold a JSON object", fetch)
    # First the architecture, so that another model is called by its name and not by a list of lost keys.
    names = found.get("architectures")
    if not isinstance(names, list) or ARCHITECTURE not in names:
        listed = ", ".join(map(str, names)) if isinstance(names, list) else ""
        have = f"has architecture {listed:.200}" if listed else "names no architecture"
        raise _bad(f"{where} {have}, expected {ARCHITECTURE}", "point at a Kimi-K3 checkpoint")
    try:
        config = KimiK3Config.model_validate_json(raw)
    except ValidationError as error:
        raise _bad(f"{where}: {_first_error(error)}", fetch) from None
    quantization = config.quantization
    if quantization is None:
        raise _bad(
            f"{where} has no quantization_config, expected format {QUANT_FORMAT}",
            "use the published MXFP4 checkpoint",
        )
    if quantization.format != QUANT_FORMAT:
        have = quantization.format or quantization.quant_method
        raise _bad(
            f"{where} has quantisation format {have}, expected {QUANT_FORMAT}",
            "use the published MXFP4 checkpoint",
        )
    for name, group in quantization.config_groups.items():
        weights = group.weights
        if weights is not None and (weights.num_bits, weights.group_size) != (4, MX_GROUP_SIZE):
            raise _bad(
                f"{where}: quantization_config.config_groups.{name} has {weights.num_bits} bits in groups of "
                f"{weights.group_size}, expected 4 bits in groups of {MX_GROUP_SIZE}",
                "use the published MXFP4 checkpoint",
            )
    return config


def read_config(path: Path) -> KimiK3Config:
    """Read and parse the ``config.json`` at ``path``.

    Raises:
        OperatorError: unreadable, too large to be a config, or anything :func:`parse_config` refuses.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(CONFIG_MAX_BYTES + 1)
    except OSError as error:
        raise _bad(
            f"{path} cannot be read ({error.strerror})", "check the path and its permissions"
        ) from None
    if len(raw) > CONFIG_MAX_BYTES:
        raise _bad(f"{path} is larger than {CONFIG_MAX_BYTES >> 20} MiB", "download config.json again")
    return parse_config(raw, where=str(path))
