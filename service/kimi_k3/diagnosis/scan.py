# SPDX-License-Identifier: Apache-2.0
"""One pass over a log of any size and content, in bounded memory: what of the catalogue is in it.

Kept are, for each row and mark, the first line that matched and the number of the last; the last lines that
look like errors; and the last exception. Lines are counted as an editor counts them. A carriage return ends a
text too (progress bars), and a line that never ends is looked at in overlapping pieces.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kimi_k3.diagnosis.catalogue import Catalogue, Level, load_catalogue
from kimi_k3.diagnosis.pattern import anchors, gates

MAX_QUOTED = 300
"""Characters of a log line that are quoted in a message."""

KEPT_ERRORS = 10
KEPT_RAW = 2000
"""Lines with a word of errors, looked at when asked: 8 ranks may each add 100 lines after the cause."""

ANSWERS_AFTER = 20
"""So many requests answered after an error show that the engine did not end because of it."""

ASKED_TO_END = "asked-to-end"
"""The mark after which what processes say of each other's end is no error."""

MAX_PIECE = 4 * 1024
OVERLAP = 1024
"""Pieces of a long line overlap by so much, so that a signature across a cut is seen whole."""

MAX_PENDING = 64 * 1024

_ANSI = re.compile(rb"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_ANSWERED = b'completions HTTP/1.1" 200'
# How the lines of vLLM's processes begin, or what they name.
_VLLM_WORDS = (b"vllm", b"vLLM", b"VLLM", b"(APIServer", b"(EngineCore", b"(Worker")
_VLLM_TIME = re.compile(rb" \d\d-\d\d \d\d:\d\d:\d\d \[")
# What users wrote and got may quote any error.
_REQUEST_WORDS = (b"Received request ", b"details: prompt: ", b"Generated response ")
_ERROR_WORDS = (
    *("ERROR", "Error", "Exception", "CRITICAL", "FATAL", "Fatal", "Killed", "Aborted", "error: "),
    *("Segmentation fault", "core dumped", "terminate called"),
)
_HARMLESS = re.compile(r"(?:^|[ )])(?:INFO|DEBUG|WARNING)(?::| \d\d-\d\d )")
_FRAME = re.compile(r"\] {2,}|Traceback \(most recent")
# The last line of a traceback, after whatever a process prefixes its lines with: "ValueError: ...".
_EXCEPTION = re.compile(r"(?:Error|Exception|Interrupt|Exit): (?=\S)")
_BEFORE_NAME = re.compile(r"[\s\]]")
_VALIDATION = re.compile(r"validation errors? for \w+$")
# Frames around another process's failure: they say that, not why (vllm/v1/engine/utils.py).
_WRAPPERS = re.compile(
    r"initialization failed|root cause|stack trace above|EngineDeadError|CancelledError|"
    r"after shutdown|KeyboardInterrupt|SystemExit"
)


@dataclass(frozen=True)
class Seen:
    """Where something was seen: first, with the text, and last."""

    line: int
    text: str
    last: int
    answered: int


@dataclass(frozen=True)
class ErrorLine:
    """A line that looks like an error."""

    line: int
    text: str
    answered: int
    reason: str = ""
    """The line after it, where that says more."""


@dataclass(frozen=True)
class Evidence:
    """What a pass found in the last start in the log.

    Attributes:
        rows: by the name of the catalogue's row.
        marks: by the name of the mark.
        errors: the last lines that look like errors, oldest first.
        exception: the last exception, wrappers around another process's failure left out.
        lines: of the whole log.
        silent: nothing was printed at all.
        is_vllm: some line is one of vLLM's.
        answered: completions that were answered.
        earlier: the same of the start before, if the log holds several.
    """

    rows: dict[str, Seen] = field(default_factory=dict)
    marks: dict[str, Seen] = field(default_factory=dict)
    errors: tuple[ErrorLine, ...] = ()
    exception: str | None = None
    lines: int = 0
    silent: bool = True
    is_vllm: bool = False
    answered: int = 0
    earlier: Evidence | None = None


@dataclass(frozen=True)
class _Watch:
    name: str
    is_mark: bool
    passes: bool
    """Whether serving on shows that it was not fatal."""

    follows: bool
    """Whether processes that end on request print it as well."""

    search: re.Pattern[str]
    everywhere: bool
    """Whether it counts on lines that tell of nothing serious."""


_Gate = tuple[bytes, tuple[str, ...]]


class Scanner:
    """Takes a log in chunks of any size; may be fed by one thread and asked by another."""

    def __init__(self, catalogue: Catalogue | None = None) -> None:
        self._watches: dict[str, list[_Watch]] = {word: [] for word in _ERROR_WORDS}
        for watch, pattern in _watches(load_catalogue() if catalogue is None else catalogue):
            for anchor in dict.fromkeys(anchors(pattern)):
                self._watches.setdefault(anchor, []).append(watch)
        self._gates = [(gate.encode(), tuple(words)) for gate, words in gates(self._watches).items()]
        self._lock = threading.Lock()
        self._pending = b""
        self._in_line = False
        self._quoting = False
        self._lines = 0
        self._silent = True
        self._is_vllm = False
        self._answered = 0
        self._earlier: Evidence | None = None
        self._begin()

    def _begin(self) -> None:
        self._rows: dict[str, Seen] = {}
        self._marks: dict[str, Seen] = {}
        self._errors: deque[ErrorLine] = deque(maxlen=KEPT_RAW)
        self._reason_follows = False

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        with self._lock:
            data = self._pending + chunk
            cut = data.rfind(b"\n") + 1
            if cut:
                self._take(data[:cut])
            self._pending = data[cut:]
            if len(self._pending) > MAX_PENDING:
                self._examine(self._lines + 1, _cleaned(self._pending), self._gates)
                self._pending = self._pending[-OVERLAP:]
                self._in_line = True

    def evidence(self) -> Evidence:
        """What was found so far, a last line without its end included."""
        with self._lock:
            if self._pending:
                self._take(self._pending + b"\n")
                self._pending = b""
            return self._evidence()

    def _evidence(self) -> Evidence:
        return Evidence(
            rows=dict(self._rows),
            marks=dict(self._marks),
            errors=tuple(self._last_errors())[::-1],
            exception=self._last_exception(),
            lines=self._lines,
            silent=self._silent,
            is_vllm=self._is_vllm,
            answered=self._answered,
            earlier=self._earlier,
        )

    def _take(self, block: bytes) -> None:
        """Look at whole lines."""
        block = _cleaned(block)
        lines = block[:-1].split(b"\n")
        if self._silent and block.strip():
            self._silent = False
        if not self._is_vllm:
            named = any(word in block for word in _VLLM_WORDS)
            self._is_vllm = named or _VLLM_TIME.search(block) is not None
        # Most of a long log: one line per request and one per ten seconds.
        rest = b"\n".join(
            [line for line in lines if not (line.endswith(b" 200 OK") or b"[loggers.py:" in line)]
        )
        open_gates = [pair for pair in self._gates if pair[0] in rest] if rest else []
        if open_gates or self._reason_follows:
            for number, line in enumerate(lines, self._lines + 1):
                if _ANSWERED in line:
                    self._answered += line.count(_ANSWERED)
                elif self._reason_follows or any(gate in line for gate, _ in open_gates):
                    self._examine(number, line, open_gates)
                self._in_line = False
        else:
            self._answered += block.count(_ANSWERED)
            self._in_line = False
        self._lines += len(lines)

    def _examine(self, number: int, line: bytes, open_gates: list[_Gate]) -> None:
        if not self._in_line:
            self._quoting = any(word in line[:MAX_PIECE] for word in _REQUEST_WORDS)
        if self._quoting:
            return
        open_gates = [pair for pair in open_gates if pair[0] in line]
        if not open_gates and not self._reason_follows:
            return
        for piece in _pieces(line):
            text = piece.decode(errors="replace").rstrip()
            if self._reason_follows:
                # pydantic puts the reason on the next line.
                last = self._errors.pop()
                self._errors.append(replace(last, reason=text[: 4 * MAX_QUOTED]))
                self._reason_follows = False
            self._look(number, text, [word for gate, words in open_gates if gate in piece for word in words])

    def _look(self, number: int, text: str, words: list[str]) -> None:
        words = [word for word in words if word in text]
        watches = dict.fromkeys(watch for word in words for watch in self._watches[word])
        harmless = _HARMLESS.search(text) is not None
        ending = ASKED_TO_END in self._marks
        for watch in watches:
            # What is told as information or a warning ends no engine, and may quote anything.
            if harmless and not watch.everywhere:
                continue
            if ending and watch.follows:
                continue
            if found := watch.search.search(text):
                self._note(watch, number, text, found.start())
        # vLLM ends with an EngineDeadError each time. The requests that a dead engine refuses would push its
        # last words out.
        if ending:
            return
        if any(word in _ERROR_WORDS for word in words) and not text.endswith(" Internal Server Error"):
            self._errors.append(ErrorLine(number, text[: 4 * MAX_QUOTED], self._answered))
            self._reason_follows = "validation error" in text and _VALIDATION.search(text) is not None

    def _note(self, watch: _Watch, number: int, text: str, at: int) -> None:
        where = self._marks if watch.is_mark else self._rows
        if watch.is_mark and watch.name == "banner" and "banner" in where:
            now = replace(self._evidence(), lines=number - 1, earlier=None)
            self._earlier = now if now.rows or now.errors else self._earlier
            self._begin()
            where = self._marks
        if watch.is_mark and watch.name == "serving" and "serving" not in where:
            # What came before did not keep it from serving.
            self._errors.clear()
        seen = where.get(watch.name)
        if seen is None or (watch.passes and self._is_over(seen)):
            where[watch.name] = Seen(number, _quoted(text, at), number, self._answered)
        else:
            where[watch.name] = replace(seen, last=number, answered=self._answered)

    def _is_over(self, seen: Seen) -> bool:
        serving = self._marks.get("serving")
        return self._answered - seen.answered >= ANSWERS_AFTER or (
            serving is not None and serving.line > seen.last
        )

    def _last_errors(self) -> Iterator[ErrorLine]:
        """The last one first."""
        found = 0
        for error in reversed(self._errors):
            if found == KEPT_ERRORS or self._answered - error.answered >= ANSWERS_AFTER:
                return
            if not _HARMLESS.search(error.text) and not _FRAME.search(error.text):
                found += 1
                yield replace(error, text=_quoted(error.text), reason="")

    def _last_exception(self) -> str | None:
        for error in reversed(self._errors):
            if not _HARMLESS.search(error.text) and not _WRAPPERS.search(error.text):
                exception = _exception(error.text)
                if exception is not None:
                    return _quoted(f"{exception} {error.reason}")
        return None


def _watches(catalogue: Catalogue) -> Iterator[tuple[_Watch, str]]:
    for row in catalogue.failures:
        if row.pattern:
            notice = row.level is Level.NOTICE
            yield (
                _Watch(
                    row.name,
                    is_mark=False,
                    passes=not notice,
                    follows=not notice and row.level.position >= Level.DEATH.position,
                    search=re.compile(row.pattern),
                    everywhere=row.warned or notice,
                ),
                row.pattern,
            )
    for name, mark in catalogue.marks.items():
        if mark.pattern:
            yield (
                _Watch(
                    name,
                    is_mark=True,
                    passes=False,
                    follows=False,
                    search=re.compile(mark.pattern),
                    everywhere=True,
                ),
                mark.pattern,
            )


def _exception(text: str) -> str | None:
    """``ValueError: what`` at the end of a line of a traceback, if it is one."""
    found = _EXCEPTION.search(text)
    if found is None:
        return None
    name = _BEFORE_NAME.split(text[max(0, found.start() - MAX_QUOTED) : found.end() - 2])[-1]
    return name + text[found.end() - 2 :] if name.replace(".", "_").isidentifier() else None


def _cleaned(data: bytes) -> bytes:
    """Without colours, and without the NULs of a file that was cut while it was written."""
    if b"\0" in data:
        data = data.replace(b"\0", b"")
    return _ANSI.sub(b"", data) if b"\x1b" in data else data


def _pieces(line: bytes) -> Iterator[bytes]:
    for part in line.split(b"\r"):
        yield part[:MAX_PIECE]
        for begin in range(MAX_PIECE - OVERLAP, len(part) - OVERLAP, MAX_PIECE - OVERLAP):
            yield part[begin : begin + MAX_PIECE]


def _quoted(text: str, at: int = 0) -> str:
    """The text from about ``at`` on one printable line of at most :data:`MAX_QUOTED` characters."""
    if at > MAX_QUOTED // 2:
        text = "..." + text[at - MAX_QUOTED // 4 :]
    text = text[: 4 * MAX_QUOTED]
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."
