# SPDX-License-Identifier: Apache-2.0
"""What AITER prints, understood: lines of its source that a double does not print."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.kernels.transcript import Transcript

ROW = (
    "  [FAIL] flydsl_moe1_a | flydsl_moe2_b  token=8 m={m} dims=(3584,3072) E=112 topk=16 "
    "gate=separated{beta}  arch=gfx942: RuntimeError: no"
)


def told(*lines: str) -> Transcript:
    transcript = Transcript()
    for line in lines:
        transcript.feed(line)
    return transcript


def test_variants_of_a_row_are_one_failure() -> None:
    """Three bounds of the activation at two numbers of tokens fail for the same reason."""
    lines = [ROW.format(m=m, beta=beta) for m in (5, 8) for beta in ("", " beta=1/1", " beta=4/25")]
    summary = "[aiter] FlyDSL MoE replay gfx942: 0 ok, 6 failed, 0 unsupported caller-side variants"
    (failure,) = told(*lines, summary).failures(1, rows=1, kernels=2)
    assert (
        str(failure) == "flydsl_moe1_a | flydsl_moe2_b at model_dim=3584 inter_dim=3072 E=112 topk=16 "
        "tokens=8: RuntimeError: no"
    )


def test_a_crash_that_came_through() -> None:
    """A worker that ran out of memory once is no failure."""
    lines = (
        "[aiter] FlyDSL flydsl_moe1_a worker crashed (exitcode=-9); retry 1/2",
        "[aiter] FlyDSL flydsl_moe1_a worker crashed (exitcode=-9); retry 2/2",
        "  Compiled:     2 ok, 0 failed",
        "All compilations succeeded. Cache is ready.",
    )
    assert told(*lines).failures(0, rows=1, kernels=2) == ()


def test_a_worker_that_was_too_slow() -> None:
    """AITER's own limit per kernel."""
    lines = (
        "[aiter] FlyDSL flydsl_moe1_a exceeded per-kernel timeout (1200s); killed; retry 1/1",
        "  Compiled:     1 ok, 1 failed",
    )
    (failure,) = told(*lines).failures(1, rows=1, kernels=2)
    assert failure.kernels == ("flydsl_moe1_a",)
    assert failure.why == "its compiler exceeded per-kernel timeout (1200s); killed"


def test_failures_without_a_name() -> None:
    """Without retries a crash is only counted: then nobody knows of which kernel."""
    found = told(
        "  Compiled:     1 ok, 1 failed", "Some compilations failed. Check output above for details."
    )
    assert not found.accounted
    (failure,) = found.failures(1, rows=1, kernels=2)
    assert failure.why == "1 failures counted, and not all of them named"


def test_a_cache_that_cannot_be_written() -> None:
    """FlyDSL only warns, and AITER reports a success."""
    lines = (
        "WARNING Failed to write compile cache: [Errno 28] No space left on device",
        "  Compiled:     2 ok, 0 failed",
        "All compilations succeeded. Cache is ready.",
    )
    (failure,) = told(*lines).failures(0, rows=1, kernels=2)
    assert "No space left" in failure.why


def test_the_line_that_says_most() -> None:
    """LLVM's last words before an exception's, and these before the last line."""
    assert told("a", "Some replays failed.").reason() == "Some replays failed."
    assert told("ImportError: no", "Some replays failed.").reason() == "ImportError: no"
    assert told("x LLVM ERROR: Cannot", "ImportError: no").reason() == "LLVM ERROR: Cannot"
    assert told().reason() == "it said nothing"


@given(st.lists(st.text()), st.sampled_from([None, -6, 0, 1]))
def test_any_output(lines: list[str], code: int | None) -> None:
    """What is not understood is never a success, and nothing of it steers a terminal."""
    found = told(*lines).failures(code, rows=1, kernels=2)
    assert found
    assert all(str(failure).isprintable() for failure in found)
