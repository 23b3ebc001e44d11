# SPDX-License-Identifier: Apache-2.0
"""vLLM's default loader, telling how far it is.

Registered under vLLM's official hook as ``--load-format kimi_k3``.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Generator, Iterator
from datetime import datetime
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from kimi_k3.checkpoint.headers import read_header
from kimi_k3.engine.reporter import rank_reporter
from kimi_k3.engine.voice import reported, say
from kimi_k3.errors import OperatorError
from kimi_k3.journal.models import Loading
from kimi_k3.journal.writer import now
from kimi_k3.words.phases import Phase

LOAD_FORMAT = "kimi_k3"


class ReportingModelLoader(DefaultModelLoader):
    """Reads safetensors shards as vLLM does, and reports bytes, shards and phases of its rank."""

    def __init__(self, load_config: LoadConfig) -> None:
        # The parent knows only its own format names.
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Load and convert; the rank then goes on to profiling and compiling."""
        with reported():
            rank_reporter().enter(Phase.LOADING)
        model: nn.Module = super().load_model(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )
        rank_reporter().loaded()
        return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Read the checkpoint; vLLM then hands each layer to its quantisation method."""
        super().load_weights(model, model_config)
        rank_reporter().enter(Phase.CONVERTING)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The parent's tensors, counted once the model has taken them."""
        extent = self._extent(model_config)
        if extent is None:
            yield from super().get_all_weights(model_config, model)
            return
        tensors = bytes_done = 0
        began_at = now()
        for name, tensor in super().get_all_weights(model_config, model):
            yield name, tensor
            tensors += 1
            bytes_done += tensor.nbytes
            rank_reporter().loading(extent.progress(tensors, bytes_done, began_at))
        rank_reporter().loading(extent.progress(tensors, bytes_done, began_at), last=True)

    def _extent(self, model_config: ModelConfig) -> _Extent | None:
        """What there is to read; ``None``, and a line, if that cannot be told: no reason not to read it."""
        try:
            # The parent's own choice: with an index, files that it does not name are not read.
            _, files, _, _ = self._prepare_weights(
                model_config.model, None, model_config.revision, True, None
            )
            return _Extent.of([Path(file) for file in files], self.local_expert_ids)
        except (OSError, OperatorError) as error:
            say(f"progress of loading is not visible: {error}")
            return None


@dataclasses.dataclass(frozen=True)
class _Extent:
    """How much a rank has to read: bytes, and tensors up to the end of each shard.

    vLLM reads shard by shard in the order of their names, so a count of tensors tells the shard.
    """

    bytes_total: int
    tensors_up_to: tuple[int, ...]

    @classmethod
    def of(cls, files: list[Path], local_expert_ids: set[int] | None) -> _Extent:
        shards = [list(_wanted(path, local_expert_ids)) for path in sorted(files)]
        return cls(
            bytes_total=sum(map(sum, shards)),
            tensors_up_to=tuple(accumulate(map(len, shards))),
        )

    def progress(self, tensors: int, bytes_done: int, began_at: datetime) -> Loading:
        return Loading(
            bytes_done=bytes_done,
            bytes_total=self.bytes_total,
            shards_done=bisect_right(self.tensors_up_to, tensors),
            shards_total=len(self.tensors_up_to),
            began_at=began_at,
        )


def _wanted(shard: Path, local_expert_ids: set[int] | None) -> Iterator[int]:
    """Bytes of each tensor of a shard that this rank reads (expert parallelism may skip the others)."""
    header = read_header(shard, size=shard.stat().st_size)
    for tensor in header.tensors:
        if not should_skip_weight(tensor.name, local_expert_ids):
            yield tensor.nbytes
