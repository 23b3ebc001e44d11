# SPDX-License-Identifier: Apache-2.0
"""One pass over anything: the same whatever the chunks, bounded in memory, quick."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.diagnosis.match import explain
from kimi_k3.diagnosis.scan import MAX_PENDING, MAX_PIECE, Evidence, Scanner

from .samples import load_samples

LLVM = b"LLVM ERROR: Do not know how to expand this operator's operand!"
ROW = "flydsl-wide-lds-load"
LINES = [line for sample in load_samples() for line in sample.lines]


def scan(*chunks: bytes) -> Evidence:
    scanner = Scanner()
    for chunk in chunks:
        scanner.feed(chunk)
    return scanner.evidence()


@settings(deadline=None)
@given(lines=st.lists(st.sampled_from(LINES), max_size=12), data=st.data())
def test_the_cuts_of_the_stream_change_nothing(lines: list[str], data: st.DataObject) -> None:
    """A pipe gives bytes in pieces that end anywhere."""
    text = "\n".join(lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert scan(*chunks) == scan(text)


@settings(deadline=None)
@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b"\r", b"\n", b"\0", b"\x1b[", b"\xff", LLVM]), max_size=20
    )
)
def test_any_bytes_are_read(parts: list[bytes]) -> None:
    """Logs hold half characters, colours cut short, and whatever a crashing process wrote."""
    text = b"".join(parts)
    evidence = scan(*parts)
    assert evidence.lines == text.count(b"\n") + (not text.endswith(b"\n") and text != b"")
    assert explain(evidence) == explain(scan(text))


@pytest.mark.parametrize(
    "text",
    [
        b"\x1b[31m" + LLVM + b"\x1b[0m\n",
        b" 50%\r 51%\r" + LLVM + b"\r 52%\n",
        b"\0" * 4096 + LLVM,
        (LLVM.decode() + "\n").encode("utf-16-le"),
        b"\xff\xfe\xc3 " + LLVM + b"\xc3\n",
        b'{"log":"' + LLVM + b'\\n","stream":"stderr"}\n',
        b"2026-10-20T12:00:00.1Z stderr F " + LLVM + b"\r\n",
    ],
)
def test_disguises_of_a_line(text: bytes) -> None:
    """Colours, progress bars, cut files, other encodings, and the wrappings of container runtimes."""
    assert ROW in scan(text).rows


@pytest.mark.parametrize(
    "before", [0, 100, MAX_PIECE - 30, MAX_PIECE, MAX_PENDING - 30, MAX_PENDING, 3_000_000]
)
@pytest.mark.parametrize("chunk", [4096, 1 << 20])
def test_a_line_of_megabytes_is_searched_throughout(before: int, chunk: int) -> None:
    """Also where a piece ends in the middle of the signature; what is quoted is about the signature."""
    text = b"x" * before + LLVM + b"y" * 100_000 + b"\nnext\n"
    evidence = scan(*(text[at : at + chunk] for at in range(0, len(text), chunk)))
    assert evidence.lines == 2
    assert evidence.rows[ROW].line == 1
    assert LLVM.decode() in evidence.rows[ROW].text


def test_a_prompt_of_megabytes_stays_unread() -> None:
    """What is hidden at its beginning is hidden to its end."""
    scanner = Scanner()
    scanner.feed(b"DEBUG Request a details: prompt: '")
    for _ in range(40):
        scanner.feed(b"x" * 10_000 + LLVM)
    scanner.feed(b"'\n")
    assert scanner.evidence().rows == {}
    scanner.feed(LLVM + b"\n")
    assert ROW in scanner.evidence().rows


def test_line_numbers_are_those_of_an_editor() -> None:
    """A carriage return redraws a line, it does not begin one."""
    assert scan(b"a\rb\rc\r\n\n" + LLVM).rows[ROW].line == 3


def busy_log(seed: int) -> bytes:
    """About a megabyte of a serving engine."""
    choose = random.Random(seed)
    lines = []
    for at in range(9000):
        if at % 7 == 0:
            lines.append(
                b"(APIServer pid=1) INFO 10-20 12:00:%02d [loggers.py] Engine 000: Avg prompt throughput: "
                b"%d.4 tokens/s, Running: 3 reqs, GPU KV cache usage: 1.2%%"
                % (at % 60, choose.randrange(9999))
            )
        elif at % 500 == 1:
            lines.append(
                b"(APIServer pid=1) ERROR 10-20 12:00:00 [x.py:1] ValueError: request %d is odd" % at
            )
        else:
            lines.append(
                b'(APIServer pid=1) INFO:     10.0.0.7:%d - "POST /v1/chat/completions HTTP/1.1" 200 OK' % at
            )
    return b"\n".join(lines) + b"\n"


def test_hundreds_of_megabytes_in_bounded_memory() -> None:
    """A log of weeks is read on a node whose memory the engine needs; the cause at its end is still found."""
    log = busy_log(1)
    scanner = Scanner()
    scanner.feed(log)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        # Tracing slows every allocation down, so only a part is traced.
        for _ in range(20):
            scanner.feed(log)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept - before < 200_000
    assert peak - before < 16 * len(log)
    begin, total = time.process_time(), len(log)
    while total < 300_000_000:
        scanner.feed(log)
        total += len(log)
    assert time.process_time() - begin < 60
    scanner.feed(LLVM)
    found = explain(scanner.evidence())
    assert found.finding is not None
    assert found.finding.name == ROW


def test_a_hostile_line_is_not_slow() -> None:
    """Words of signatures in great number, which is the worst that a pattern with repeats can meet."""
    scanner = Scanner()
    begin = time.process_time()
    for word in (
        b"LLVM ERROR: Cannot select: v2bf16",
        b"ValueError: EPLB ",
        b"HIP error 70 ",
        b"libibverbs ",
        b"moe_backend='",
    ):
        scanner.feed(word * 20_000 + b"\n")
    assert time.process_time() - begin < 20
