# SPDX-License-Identifier: Apache-2.0
"""The files beside the weights, without which vLLM ends ten seconds into a start."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kimi_k3.checkpoint import ProblemKind, inspect_checkpoint, require_servable
from kimi_k3.checkpoint.preprocessing import Code, code_in, preprocessing_problems
from kimi_k3.checkpoint.tiny_files import json_files
from kimi_k3.errors import ExitCode, OperatorError

from .imitation import FOREIGN, SPECIAL_FILES, edit_json, write_small

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENIZER, CONFIG, IMAGES = "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"
VOCABULARY, MODULE = "tiktoken.model", "tokenization_kimi.py"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Those of the tiny checkpoint."""
    for name, document in json_files().items():
        (tmp_path / name).write_text(json.dumps(document))
    return tmp_path


@pytest.fixture
def published(tiny: Path) -> Path:
    """In the published form: a vocabulary, and the module that reads it."""
    (tiny / TOKENIZER).unlink()
    (tiny / VOCABULARY).write_text("IQ== 0\n")
    (tiny / MODULE).write_text("raise RuntimeError('nobody may import this')\n")
    classes = ["tokenization_kimi.TikTokenTokenizer", None]
    edit_json(tiny / CONFIG, auto_map={"AutoTokenizer": classes}, tokenizer_class="TikTokenTokenizer")
    return tiny


def whats(directory: Path) -> list[str]:
    problems = list(preprocessing_problems(directory))
    assert {problem.kind for problem in problems} <= {ProblemKind.PREPROCESSING}
    assert all(str(problem).isprintable() for problem in problems)
    return [problem.what.replace(f"{directory}/", "") for problem in problems]


def test_both_forms(tiny: Path) -> None:
    """That of the tokenizers library, and that of the published checkpoint beside it."""
    assert whats(tiny) == []
    (tiny / VOCABULARY).write_text("IQ== 0\n")
    assert whats(tiny) == []


def test_code_that_comes_with_a_checkpoint(published: Path) -> None:
    """The published tokenizer is Python beside the weights: whoever lets it run must see what it is."""
    code = code_in(published)
    assert code.needed_by == (CONFIG,)
    assert [name for name, _ in code.files] == [MODULE]
    assert code.files[0][1] == hashlib.sha256((published / MODULE).read_bytes()).hexdigest()[:12]
    edit_json(published / IMAGES, auto_map={"AutoImageProcessor": "k3_vision.Processor"})
    assert code_in(published).needed_by == (CONFIG, IMAGES)


def test_a_tokenizer_without_code(tiny: Path) -> None:
    """With tokenizer.json nothing of the checkpoint needs to run, whatever its auto_map says."""
    assert code_in(tiny) == Code(needed_by=(), files=())
    edit_json(tiny / CONFIG, auto_map={"AutoTokenizer": ["elsewhere.Class", None]})
    assert code_in(tiny).needed_by == ()


def test_the_published_form(published: Path) -> None:
    """It has no tokenizer.json, and must not be refused for that."""
    assert whats(published) == []
    edit_json(published / CONFIG, auto_map={"AutoTokenizer": "owner/other--elsewhere.Class"})
    (published / MODULE).unlink()
    assert whats(published) == []


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (TOKENIZER, "has no tokenizer, neither tokenizer.json nor tiktoken.model"),
        (CONFIG, "has no tokenizer_config.json"),
        (IMAGES, "has no preprocessor_config.json"),
    ],
)
def test_a_file_that_is_missing(tiny: Path, name: str, what: str) -> None:
    """A link into the hub's cache whose file is gone is as good as none."""
    (tiny / name).unlink()
    assert whats(tiny) == [f"checkpoint {tiny} {what}"]
    (tiny / name).symlink_to("../blobs/1")
    assert whats(tiny) == [f"checkpoint {tiny} {what}"]


def test_a_download_of_some_kinds_of_files(published: Path) -> None:
    """Weights and JSON without the Python that the tokenizer consists of."""
    (published / MODULE).unlink()
    assert whats(published) == [f"checkpoint {published} has no {MODULE}, which {CONFIG} names"]


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        (TOKENIZER, '{"model": ', "is not valid JSON"),
        (TOKENIZER, "{}", "is no tokenizer (it has no model)"),
        (TOKENIZER, "", "is not valid JSON"),
        (CONFIG, "[]", "is not a JSON object"),
        (IMAGES, "version https://git-lfs.github.com/spec/v1", "is not valid JSON"),
        ("special_tokens_map.json", "{", "is not valid JSON"),
        (VOCABULARY, "", "is empty"),
    ],
)
def test_a_file_that_is_damaged(tiny: Path, name: str, text: str, what: str) -> None:
    """Cut off, empty, or the pointer that stands for a file in Git LFS."""
    (tiny / name).write_text(text)
    (found,) = whats(tiny)
    assert found.startswith(f"{name} {what}")


@pytest.mark.parametrize("kind", SPECIAL_FILES)
@pytest.mark.parametrize("name", [TOKENIZER, CONFIG, VOCABULARY])
def test_a_file_that_cannot_be_read(tiny: Path, name: str, kind: str) -> None:
    """As one of another user; a FIFO must not be waited for."""
    (tiny / name).unlink(missing_ok=True)
    SPECIAL_FILES[kind](tiny / name)
    (found,) = whats(tiny)
    assert found.startswith(f"{name} cannot be read (it is a {kind}")


@pytest.mark.parametrize("text", [*FOREIGN, "../x", "", 7, [], {"AutoTokenizer": 7}])
def test_a_config_that_names_nonsense(published: Path, text: object) -> None:
    """No path outside the directory is looked at, and nothing of it steers a terminal."""
    edit_json(published / CONFIG, auto_map={"AutoTokenizer": [text]})
    assert whats(published) == []
    edit_json(published / CONFIG, auto_map=text)
    assert whats(published) == []


SPOIL: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "cut off": lambda path: path.write_text("{"),
}


@pytest.mark.parametrize("how", SPOIL)
def test_it_belongs_to_the_inspection(tmp_path: Path, how: str) -> None:
    """``show``, preflight and ``serve`` refuse it alike; whoever reads only the weights does not."""
    (tmp_path / "k3").mkdir()
    directory = write_small(tmp_path / "k3")
    SPOIL[how](directory / TOKENIZER)
    found = inspect_checkpoint(directory)
    assert [problem.kind for problem in found.fatal] == [ProblemKind.PREPROCESSING]
    with pytest.raises(OperatorError, match=re.escape(found.fatal[0].what)) as caught:
        require_servable(directory)
    assert caught.value.exit_code is ExitCode.BAD_CHECKPOINT
    assert require_servable(directory, weights_only=True).total_bytes == found.total_bytes
