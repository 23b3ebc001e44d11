# SPDX-License-Identifier: Apache-2.0
"""Downloading a checkpoint from the Hugging Face hub, or a mirror of it, and looking at what came."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kimi_k3.checkpoint.inspection import Checkpoint, require_servable
from kimi_k3.errors import ExitCode, OperatorError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LONGEST = 300
"""Characters of the hub's words that are quoted."""


def download_checkpoint(
    repository: str, path: Path, *, revision: str, report: Callable[[str], None]
) -> Checkpoint:
    """Bring one commit of ``repository`` into ``path``; what is there already is not fetched again.

    The hub's own library does it: it resumes, checks sizes, and takes ``HF_ENDPOINT``, ``HF_TOKEN``,
    ``HF_TOKEN_PATH`` and proxies from the environment. What came is then held against the index.

    Args:
        revision: a commit, 40 hexadecimal digits: a branch or a tag can become something else.

    Raises:
        OperatorError: the names are none, the library is not installed, the download fails, or what came
            cannot be served.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise _usage(f"repository {repository!r}: is not OWNER/NAME", "give one such as moonshotai/Kimi-K3")
    if not _COMMIT.fullmatch(revision):
        raise _usage(
            f"--revision {revision!r}: is not a commit",
            "give its 40 hexadecimal digits, as the hub shows",
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise OperatorError(
            "huggingface_hub is not installed",
            remedy="download in the engine's image, where it is, or pip install huggingface_hub",
        ) from None
    report(f"downloading {repository} at {revision} into {path}")
    try:
        snapshot_download(repository, revision=revision, local_dir=path)
    # The library raises its HTTP client's errors, its own, and the system's: all end this one command.
    except Exception as error:
        words = " ".join(str(error).split())[:_LONGEST]
        raise OperatorError(
            f"checkpoint {path}: the download of {repository} failed: {type(error).__name__}: {words}",
            remedy="mend that and run the same command again: it goes on where it was",
        ) from None
    checkpoint = require_servable(path)
    report(f"{path} is complete: {len(checkpoint.shards)} shards, {checkpoint.total_bytes or 0:,} bytes")
    return checkpoint


def _usage(what: str, remedy: str) -> OperatorError:
    return OperatorError(what, remedy=remedy, exit_code=ExitCode.USAGE)
