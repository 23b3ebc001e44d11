# SPDX-License-Identifier: Apache-2.0
"""What is on disk: ``config.json``, the index and the safetensors headers; and a tiny checkpoint for tests.

Reads no weights and needs neither torch nor vLLM; only writing the tiny checkpoint needs numpy.
"""

from kimi_k3.checkpoint.config import (
    ARCHITECTURE,
    QUANT_FORMAT,
    KimiK3Config,
    TextConfig,
    parse_config,
    read_config,
)
from kimi_k3.checkpoint.headers import ShardHeader, TensorEntry, TruncatedShard, parse_header, read_shard
from kimi_k3.checkpoint.inspection import (
    Checkpoint,
    Shard,
    ShardState,
    inspect_checkpoint,
    require_servable,
)
from kimi_k3.checkpoint.layout import ExpertShape, TensorSpec, all_tensors, expert_shape
from kimi_k3.checkpoint.problem import Problem, ProblemKind
from kimi_k3.checkpoint.shipped import MINIATURE
from kimi_k3.checkpoint.tiny import make_tiny_checkpoint

__all__ = [
    "ARCHITECTURE",
    "MINIATURE",
    "QUANT_FORMAT",
    "Checkpoint",
    "ExpertShape",
    "KimiK3Config",
    "Problem",
    "ProblemKind",
    "Shard",
    "ShardHeader",
    "ShardState",
    "TensorEntry",
    "TensorSpec",
    "TextConfig",
    "TruncatedShard",
    "all_tensors",
    "expert_shape",
    "inspect_checkpoint",
    "make_tiny_checkpoint",
    "parse_config",
    "parse_header",
    "read_config",
    "read_shard",
    "require_servable",
]
