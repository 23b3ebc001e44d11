# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for the tests: the published one's imitation, and small ones to break.

The imitation has the published config, every header, the whole index, and sparse files of the published
sizes: 1.42 TiB that take some 150 MB of disk.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3.checkpoint.config import KimiK3Config, parse_config
from kimi_k3.checkpoint.index import INDEX_NAME
from kimi_k3.checkpoint.layout import all_tensors
from kimi_k3.checkpoint.tiny import safetensors_header, shard_name, split_shards
from kimi_k3.checkpoint.tiny_files import json_files, model_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PUBLISHED_CONFIG = Path(__file__).parent / "data" / "k3-config.json"
PUBLISHED_SHARDS = 96
#: Text that must not reach a terminal as it is: an escape sequence, a forged line.
FOREIGN_NAMES = ("\x1b[2J", "a\nerror: b", "a\r\x85\u2028\u202eb")
#: And half a surrogate pair, which the readers of index and headers refuse.
FOREIGN = (*FOREIGN_NAMES, "\ud800", "\udc80x")
#: How to make what is not a regular file, by the name messages give it.
SPECIAL_FILES: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "directory": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


def published_config() -> KimiK3Config:
    """The published config.json (its quantised text model, whole)."""
    return parse_config(PUBLISHED_CONFIG.read_bytes(), where=str(PUBLISHED_CONFIG))


def write_imitation(directory: Path, config_text: str, shards: int) -> None:
    """Write the checkpoint that ``config_text`` describes, with holes for weights."""
    config = parse_config(config_text.encode(), where="config.json")
    (directory / "config.json").write_text(config_text)
    weight_map: dict[str, str] = {}
    total = 0
    for number, specs in enumerate(split_shards(tuple(all_tensors(config)), shards), start=1):
        name = shard_name(number, shards)
        header = safetensors_header(specs)
        size = sum(spec.nbytes for spec in specs)
        with (directory / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + size)
        weight_map.update((spec.name, name) for spec in specs)
        total += size
    # As ``json.dumps(index, indent=2)``, the published form, which takes seconds for half a million names.
    for name, document in json_files().items():
        if name != "config.json":
            (directory / name).write_text(json.dumps(document))
    entries = ",\n".join(f'    "{name}": "{shard}"' for name, shard in weight_map.items())
    metadata = f'  "metadata": {{\n    "total_size": {total}\n  }}'
    text = f'{{\n{metadata},\n  "weight_map": {{\n{entries}\n  }}\n}}'
    (directory / INDEX_NAME).write_text(text)


def write_small(directory: Path) -> Path:
    """The tiny checkpoint's config with holes for weights, in three shards: quick to write, made to break."""
    write_imitation(directory, json.dumps(model_config()), 3)
    return directory


def edit_json(path: Path, **changes: Any) -> None:
    """Set top-level keys of a JSON file; None removes one."""
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))
