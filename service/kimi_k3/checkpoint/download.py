# SPDX-License-Identifier: Apache-2.0
"""Downloading a checkpoint from the Hugging Face hub, or a mirror of it, and looking at what came."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kimi_k3.checkpoint.inspection import Checkpoint, incomplete_files, require_servable
from kimi_k3.checkpoint.provenance import of_another_commit
from kimi_k3.errors import ExitCode, OperatorError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LOCK = ".kimi-k3-download.lock"
_LONGEST = 300
"""Characters of the hub's words that are quoted."""


def download_checkpoint(
    repository: str, path: Path, *, revision: str, report: Callable[[str], None]
) -> Checkpoint:
    """Bring one commit of ``repository`` into ``path``; files that are whole are not fetched again.

    The hub's own library does it, and takes ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_TOKEN_PATH`` and proxies from
    the environment. What came is then held against the index. Of a download that was killed the library
    leaves the files that it was at, each under a name of its own, and never looks at them again: they are
    removed, or they would fill the volume and look like a download that is still under way.

    Args:
        revision: a commit, 40 hexadecimal digits: a branch or a tag can become something else.

    Raises:
        OperatorError: the names are none, the library is not installed, another download is at work there,
            the download fails, or what came cannot be served.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise _usage(f"repository {repository!r}: is not OWNER/NAME", "give one such as moonshotai/Kimi-K3")
    if not _COMMIT.fullmatch(revision):
        raise _usage(
            f"--revision {revision!r}: is not a commit",
            "give its 40 hexadecimal digits, as the hub shows",
        )
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise OperatorError(
            "huggingface_hub is not installed",
            remedy="download in the engine's image, where it is, or pip install huggingface_hub",
        ) from None
    report(f"downloading {repository} at {revision} into {path}")
    with _alone(path):
        try:
            # Where the hub cannot be asked, the download would return what is there, of whatever commit.
            siblings = HfApi().model_info(repository, revision=revision).siblings or []
            _remove_leftovers(path)
            snapshot_download(repository, revision=revision, local_dir=path)
        # The library raises its HTTP client's errors, its own, and the system's: all end this one command.
        except Exception as error:
            words = " ".join(str(error).split())[:_LONGEST]
            raise OperatorError(
                f"checkpoint {path}: the download of {repository} failed: {type(error).__name__}: {words}",
                remedy="mend that and run the same command again: what has come is not fetched again",
            ) from None
    other = of_another_commit(path, [each.rfilename for each in siblings], revision)
    if other:
        raise OperatorError(
            f"checkpoint {path}: {len(other)} files are not of {revision} ({other[0]} is one)",
            remedy="run the same command again; remove the directory if that does not help",
            exit_code=ExitCode.BAD_CHECKPOINT,
        )
    checkpoint = require_servable(path)
    report(f"{path} is complete: {len(checkpoint.shards)} shards, {checkpoint.total_bytes or 0:,} bytes")
    return checkpoint


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Held by one download at a time, as far as the file system knows locks; gone with its process."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o664)
    except OSError as error:
        raise OperatorError(
            f"checkpoint {path}: {error.strerror}", remedy="name a directory that can be written"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OperatorError(
            f"checkpoint {path}: another download is at work there",
            remedy="let it finish, or end it",
            exit_code=ExitCode.IN_USE,
        ) from None
    except OSError:
        # No locks on this file system.
        pass
    try:
        yield
    finally:
        (path / _LOCK).unlink(missing_ok=True)
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    for name in incomplete_files(path):
        (path / name).unlink(missing_ok=True)


def _usage(what: str, remedy: str) -> OperatorError:
    return OperatorError(what, remedy=remedy, exit_code=ExitCode.USAGE)
