# SPDX-License-Identifier: Apache-2.0
"""The files by which vLLM makes tokens of text and images, beside the weights: there, readable, whole.

vLLM reads them some 10 s into a start. Two forms of a tokenizer are known: that of
``tokenizers`` (``tokenizer.json``), and that of the published checkpoint, a vocabulary (``tiktoken.model``)
with the Python module that ``tokenizer_config.json`` names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_k3.checkpoint.problem import Problem, ProblemKind
from kimi_k3.files import open_regular, read_small

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARY = "tiktoken.model"
IMAGES = ("preprocessor_config.json", "processor_config.json")
OPTIONAL = ("special_tokens_map.json", "added_tokens.json")
#: Bytes; a tokenizer.json of 163,840 tokens and their merges has some 20 MB.
MAX_BYTES = 256 << 20
MAX_CODE_BYTES = 4 << 20

_AGAIN = "download that file again"
_MISSING = "download it, it belongs to the checkpoint"


def preprocessing_problems(directory: Path) -> Iterator[Problem]:
    """What is wrong with the tokenizer of the checkpoint in ``directory``, and what it needs for images."""
    if not _there(directory / TOKENIZER_CONFIG):
        yield _problem(f"checkpoint {directory} has no {TOKENIZER_CONFIG}", _MISSING)
    if not _there(directory / TOKENIZER) and not _there(directory / VOCABULARY):
        yield _problem(
            f"checkpoint {directory} has no tokenizer, neither {TOKENIZER} nor {VOCABULARY}",
            "download the files beside the weights, too",
        )
    if not any(_there(directory / name) for name in IMAGES):
        # Even with --language-model-only vLLM makes the image processor.
        yield _problem(f"checkpoint {directory} has no {IMAGES[0]}", _MISSING)
    for name in (TOKENIZER, TOKENIZER_CONFIG, *IMAGES, *OPTIONAL):
        if _there(directory / name):
            found = _document(directory / name)
            if isinstance(found, Problem):
                yield found
            elif name == TOKENIZER and "model" not in found:
                yield _problem(f"{directory / name} is no tokenizer (it has no model)", _AGAIN)
            elif name == TOKENIZER_CONFIG and not _there(directory / TOKENIZER):
                yield from _modules(directory, found)
    if _there(directory / VOCABULARY) and (bad := _unreadable(directory / VOCABULARY)) is not None:
        yield bad


@dataclass(frozen=True)
class Code:
    """Python that comes with a checkpoint.

    Attributes:
        needed_by: files whose ``auto_map`` names a class in it that vLLM cannot do without.
        files: every module in the directory and the first digits of its SHA-256.
    """

    needed_by: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


def code_in(directory: Path) -> Code:
    """What vLLM would run of a checkpoint, if it is allowed to.

    A tokenizer in the form of ``tokenizers`` needs none, whatever its ``auto_map`` says.
    """
    needed = []
    for name, classes, instead in (
        (TOKENIZER_CONFIG, "AutoTokenizer", TOKENIZER),
        *((name, kind, None) for name in IMAGES for kind in ("AutoProcessor", "AutoImageProcessor")),
    ):
        found = _document(directory / name) if _there(directory / name) else {}
        mapped = found.get("auto_map") if isinstance(found, dict) else None
        names_one = isinstance(mapped, dict) and mapped.get(classes)
        if names_one and name not in needed and (instead is None or not _there(directory / instead)):
            needed.append(name)
    modules = []
    for path in sorted(directory.glob("*.py")):
        with contextlib.suppress(OSError):
            raw = read_small(path, limit=MAX_CODE_BYTES)
            modules.append((path.name, hashlib.sha256(raw).hexdigest()[:12]))
    return Code(needed_by=tuple(needed), files=tuple(modules))


def _modules(directory: Path, config: dict[str, Any]) -> Iterator[Problem]:
    """The Python modules in the checkpoint that make a tokenizer of the vocabulary."""
    classes = config["auto_map"].get("AutoTokenizer") if isinstance(config.get("auto_map"), dict) else None
    for name in [classes] if isinstance(classes, str) else classes if isinstance(classes, list) else []:
        # "owner/repository--module.Class" is elsewhere.
        module = name.partition(".")[0] if isinstance(name, str) else ""
        if not module.isidentifier():
            continue
        path = directory / f"{module}.py"
        if not _there(path):
            yield _problem(
                f"checkpoint {directory} has no {path.name}, which {TOKENIZER_CONFIG} names", _MISSING
            )
        elif (found := _unreadable(path)) is not None:
            yield found


def _there(path: Path) -> bool:
    """Whether there is something; a link into the hub's cache without its file counts as missing."""
    try:
        return path.exists()
    except OSError:
        return True


def _document(path: Path) -> dict[str, Any] | Problem:
    try:
        raw = read_small(path, limit=MAX_BYTES)
    except OSError as error:
        return _not_read(path, error)
    try:
        found = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return _problem(f"{path} is not valid JSON ({error})", _AGAIN)
    return found if isinstance(found, dict) else _problem(f"{path} is not a JSON object", _AGAIN)


def _unreadable(path: Path) -> Problem | None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return _not_read(path, error)
    return None if size else _problem(f"{path} is empty", _AGAIN)


def _not_read(path: Path, error: OSError) -> Problem:
    return _problem(f"{path} cannot be read ({error.strerror})", "check its permissions and the file system")


def _problem(what: str, remedy: str) -> Problem:
    return Problem.of(ProblemKind.PREPROCESSING, what, remedy)
