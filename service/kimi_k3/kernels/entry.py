# SPDX-License-Identifier: Apache-2.0
"""One run of AITER's entry: its environment, its processes, its lines; and its end, whatever that is."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.host import read_cgroup_memory, read_host_memory
from kimi_k3.kernels.installed import ENTRY_MODULE, Aiter
from kimi_k3.terminal import Terminated
from kimi_k3.words.environment import PREFIX
from kimi_k3.words.gpus import Gpu
from kimi_k3.words.python import python_module

CACHE = "FLYDSL_RUNTIME_CACHE_DIR"
LIGHT_IMPORT = "AITER_AOT_IMPORT"
TABLE = "AITER_CONFIG_FMOE"
RUN_ONLY = "FLYDSL_RUNTIME_RUN_ONLY"
WORKERS = "AITER_FLYDSL_AOT_WORKERS"
RETRIES = "AITER_FLYDSL_AOT_MAX_RETRIES"

KEPT = (
    # How long AITER's entry tries, and where its compiled modules are.
    "AITER_FLYDSL_AOT_TIMEOUT", RETRIES, "AITER_JIT_DIR", "AITER_LOG_LEVEL",
    # Part of FlyDSL's key: a start with other values would find nothing.
    "FLYDSL_COMPILE_BACKEND", "FLYDSL_COMPILE_LLVM_DIR", "FLYDSL_COMPILE_OPT_LEVEL",
    "FLYDSL_DEBUG_ENABLE_DEBUG_INFO", "FLYDSL_EXTRA_SOURCE_DIRS",
)  # fmt: skip
"""What an operator's environment may say to AITER and FlyDSL; all else decides what is compiled, or where."""

_DROPPED = frozenset(
    {"ARCH", "COMPILE_ONLY", "CU_NUM", "GPU_ARCHS", "HSA_OVERRIDE_GFX_VERSION", "PYTHONINSPECT"}
    # With a buffer each worker writes its lines in one piece; without one they run into each other.
    | {"PYTHONUNBUFFERED"}
)
_DROPPED_PREFIXES = ("AITER_", "FLYDSL_", "VLLM_", PREFIX)
_HIDDEN_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

WORKER_BYTES = 5 * 2**29
"""What a compiling process takes at most, according to AITER (1.5 to 2.5 GB)."""
MOST_WORKERS = 64

GRACE_SECONDS = 5.0
"""Between the signal that asks a run to end and the one that ends it."""

_POLL_SECONDS = 0.2
_READ_BYTES = 64 << 10
_LONGEST_LINE = 64 << 10


def environment_of_entry(
    inherited: Mapping[str, str],
    aiter: Aiter,
    *,
    cache: Path,
    table: Path,
    gpu: Gpu,
    workers: int,
    search: Sequence[str] | None = None,
) -> dict[str, str]:
    """The environment of a run.

    Args:
        inherited: this process's.
        aiter: whose entry it is.
        cache: FlyDSL's directory.
        table: what is compiled. It is also the runtime's table: without one, merely importing the entry makes
            AITER merge all that it ships, and one of those may be ragged.
        gpu: what it is compiled for; GPUs of this machine are hidden, so that all machines compile the same.
        workers: processes at a time.
        search: where Python finds packages, if not in its own way.
    """
    kept = {
        name: value
        for name, value in inherited.items()
        if name in KEPT or not (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
    }
    if search is not None:
        kept["PYTHONPATH"] = os.pathsep.join(search)
    return {
        **kept,
        **dict.fromkeys(_HIDDEN_GPUS, "-1"),
        "ARCH": gpu.architecture,
        "CU_NUM": str(gpu.compute_units),
        "FLYDSL_GPU_ARCH": gpu.architecture,
        "GPU_ARCHS": gpu.architecture,
        CACHE: str(cache),
        TABLE: str(table),
        WORKERS: str(workers),
        **({LIGHT_IMPORT: "1"} if aiter.imports_lightly else {}),
    }


def worker_count(inherited: Mapping[str, str]) -> int:
    """Compiling processes at a time: what the operator said, or as many as cores and memory allow.

    Raises:
        OperatorError: the variable is no number from 1 on.
    """
    if (given := inherited.get(WORKERS, "")) != "":
        if not (given.isascii() and given.isdigit() and int(given[:9]) > 0):
            raise OperatorError(
                f"environment variable {WORKERS}={given!r}: is no number of processes",
                remedy="give a whole number from 1 on, or unset it",
                exit_code=ExitCode.USAGE,
            )
        return int(given[:9])
    group = read_cgroup_memory()
    left = [read_host_memory().available_bytes]
    if group is not None and group.limit_bytes is not None:
        left.append(group.limit_bytes - (group.used_bytes or 0))
    by_memory = [known // WORKER_BYTES for known in left if known is not None]
    return max(1, min(len(os.sched_getaffinity(0)), MOST_WORKERS, *by_memory))


def run_entry(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    directory: Path,
    tell: Callable[[str], None],
    seconds: float | None = None,
    pause: Callable[[float], bool] | None = None,
) -> int | None:
    """Run the entry and everything that it starts, and leave none of it running.

    A signal for this process (Ctrl-C, SIGTERM, SIGHUP) goes to all of its processes and is raised again.

    Args:
        arguments: of the entry.
        environment: the whole.
        directory: where it runs.
        tell: gets each line that it prints.
        seconds: after which it is ended.
        pause: waits some seconds between looks at it, and says whether to go on.

    Returns:
        Its exit code as :mod:`subprocess` gives it; ``None`` if the time was up, or it should not go on.

    Raises:
        OperatorError: it cannot be started.
    """
    try:
        child = subprocess.Popen(
            python_module(ENTRY_MODULE, *arguments),
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise OperatorError(
            f"AITER's compiler in {directory}: cannot be started ({error.strerror or error})",
            remedy="check the directory and the limits of this user",
        ) from None
    try:
        # An end by abort is expected; nobody needs gigabytes of core.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
        return _follow(child, tell, None if seconds is None else time.monotonic() + seconds, pause)
    except KeyboardInterrupt:
        _ask_to_end(child, signal.SIGINT)
        raise
    except Terminated as end:
        _ask_to_end(child, end.number)
        raise
    finally:
        _signal_group(child, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def _follow(
    child: subprocess.Popen[bytes],
    tell: Callable[[str], None],
    deadline: float | None,
    pause: Callable[[float], bool] | None,
) -> int | None:
    assert child.stdout is not None
    pipe = child.stdout.fileno()
    os.set_blocking(pipe, False)
    lines = _Lines()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            if selector.select(_POLL_SECONDS if pause is None else 0):
                chunk = os.read(pipe, _READ_BYTES)
                for line in lines.feed(chunk):
                    tell(line)
                if not chunk:
                    break
            elif child.poll() is not None:
                # It may have written between the two looks. A worker that outlives it may keep the pipe.
                with contextlib.suppress(BlockingIOError):
                    while chunk := os.read(pipe, _READ_BYTES):
                        for line in lines.feed(chunk):
                            tell(line)
                break
            elif pause is not None and not pause(_POLL_SECONDS):
                return None
    for line in lines.feed(b"\n"):
        tell(line)
    try:
        return child.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _ask_to_end(child: subprocess.Popen[bytes], number: int) -> None:
    _signal_group(child, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_SECONDS)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


class _Lines:
    """Bytes as lines of text; one without an end is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        *whole, self._rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", errors="replace") for line in whole if line.strip()]
