# SPDX-License-Identifier: Apache-2.0
"""What is made of a log: the right row, the cause before its consequences, and no guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.diagnosis.catalogue import Level, load_catalogue
from kimi_k3.diagnosis.match import Diagnosis, explain, explain_lines, from_shell
from kimi_k3.diagnosis.scan import ANSWERS_AFTER, MAX_QUOTED, Scanner

from .samples import Sample, load_samples

LLVM = "LLVM ERROR: Do not know how to expand this operator's operand!"
WRAPPER = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
OUT_OF_MEMORY = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.15 GiB"
WAITING = (
    "INFO 10-20 12:01:00 [shm_broadcast.py] No available shared memory broadcast block found in 60 seconds."
)
BANNER = "(APIServer pid=1) INFO 10-20 12:00:00 [api_utils.py:286] non-default args: {'model': '/models/k3'}"
SERVING = "(APIServer pid=1) INFO 10-20 12:30:00 [entry.py:140] Starting vLLM server on http://0.0.0.0:8000"
STOPPED = (
    "(APIServer pid=1) INFO 10-20 13:00:00 [launcher.py:254] [shutdown] API server: shutdown triggered",
    "(EngineCore pid=9) INFO 10-20 13:00:00 [core.py:1454] [shutdown] EngineCore: trigger received signal",
    "(APIServer pid=1) ERROR 10-20 13:00:06 [async_llm.py:906] AsyncLLM output_handler failed.",
    "(APIServer pid=1) ERROR 10-20 13:00:06 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: "
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "INFO:     Application shutdown complete.",
)
NOTICES = [row.name for row in load_catalogue().failures if row.level is Level.NOTICE]
ANSWERED = '(APIServer pid=1) INFO:     10.0.0.7:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK'


def name(found: Diagnosis) -> str | None:
    return None if found.finding is None else found.finding.name


def noticed(found: Diagnosis) -> list[str]:
    return [one.name for one in found.noticed]


@pytest.mark.parametrize("sample", load_samples(), ids=lambda sample: f"{sample.number}-{sample.row}")
@pytest.mark.parametrize("colour", [False, True])
def test_a_sample_is_explained_by_its_row(sample: Sample, colour: bool) -> None:
    """Nothing in the catalogue outranks it; a wrapper or a notice alone is named but is no cause."""
    noise = ["INFO 10-20 11:59:00 [x.py:1] well"] if sample.lines else []
    lines = [*noise, *(f"\x1b[0;36m{line}\x1b[0;0m" if colour else line for line in sample.lines), *noise]
    found = explain_lines(lines, sample.exit_code)
    level = next(row.level for row in load_catalogue().failures if row.name == sample.row)
    if level is Level.WRAPPER:
        assert found.finding is None
        assert found.others[0].name == sample.row
    elif level is Level.NOTICE:
        assert found.finding is None
        assert found.noticed[0].name == sample.row
    else:
        assert name(found) == sample.row


@pytest.mark.parametrize("sample", load_samples(), ids=lambda sample: f"{sample.number}-{sample.row}")
def test_an_exit_code_of_a_shell_is_the_same(sample: Sample) -> None:
    """Containers and shells tell 137 where subprocess tells -9."""
    code = sample.exit_code
    if code is not None and code < 0:
        assert explain_lines(sample.lines, 128 - code) == explain_lines(sample.lines, code)


@pytest.mark.parametrize(
    ("code", "signal"),
    [(134, -6), (135, -7), (137, -9), (139, -11), (-9, -9), (0, 0), (1, 1), (128, 128), (255, 255)],
)
def test_codes_of_shells(code: int, signal: int) -> None:
    """128 itself and what is beyond the signals mean no signal."""
    assert from_shell(code) == signal


@pytest.mark.parametrize(
    ("code", "row"), [(-6, "abort"), (-7, "bus-error"), (-9, "worker-killed"), (-11, "segmentation-fault")]
)
def test_the_exit_code_is_the_last_resort(code: int, row: str) -> None:
    """It says how the process ended; a line that says why comes first."""
    assert name(explain_lines(["ValueError: odd"], code)) == row
    assert name(explain_lines([LLVM], code)) == "flydsl-wide-lds-load"


def test_the_cause_wins_over_what_it_caused() -> None:
    """Timeouts, dead workers and wrappers of the other processes may come before the cause is printed."""
    lines = [
        "TimeoutError: Timed out waiting for engine core processes to start.",
        WRAPPER,
        "Worker proc VllmWorker-3 died unexpectedly (exit code: -6), shutting down executor.",
        LLVM,
    ]
    found = explain_lines(lines, -6)
    assert name(found) == "flydsl-wide-lds-load"
    assert found.finding is not None
    assert found.finding.line == 4
    assert [other.name for other in found.others] == [
        *("abort", "engine-ready-timeout", "initialization-failed", "worker-died")
    ]


def test_of_equal_causes_the_earliest_is_the_answer() -> None:
    """What follows a cause is often its consequence."""
    assert name(explain_lines(["KeyError: torch.int4", LLVM])) == "no-torch-int4-in-safetensors"
    assert name(explain_lines([LLVM, "KeyError: torch.int4"])) == "flydsl-wide-lds-load"


def test_a_killed_worker_is_not_a_watchdog() -> None:
    """The other ranks wait for one that is gone, and complain."""
    lines = [
        "[rank1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",
        "Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor.",
    ]
    assert name(explain_lines(lines)) == "worker-killed"


def test_int4_that_was_honoured_is_not_ignored() -> None:
    """The signature is what is missing, so what is there silences it; and a log may end early."""
    sample = next(sample for sample in load_samples() if sample.number == 15)
    asked, _, loaded = sample.lines
    warning = "WARNING [mxfp4.py:561] Requantizing Kimi-K3 MXFP4 experts to groupwise int4 for gfx942."
    assert noticed(explain_lines([asked, warning, loaded])) == []
    assert noticed(explain_lines([asked])) == []
    assert noticed(explain_lines([loaded])) == []
    assert noticed(explain_lines([asked, loaded])) == ["int4-ignored"]


def test_unknown_stays_unknown() -> None:
    """An exception that nobody knows is quoted, a notice beside it is not made the reason."""
    found = explain_lines(
        [WAITING, "(Worker_TP0 pid=7) ValueError: the shard is not what it seems", WRAPPER], 1
    )
    assert found.finding is None
    assert found.exception == "ValueError: the shard is not what it seems"
    assert [error.line for error in found.errors] == [2, 3]
    assert noticed(found) == ["waiting-for-a-worker"]


@pytest.mark.parametrize("lines", [[], ["INFO all is well"], ["ErrorCorrection: on", "0 errors"]])
@pytest.mark.parametrize("code", [None, 1, 255])
def test_nothing_to_go_by(lines: list[str], code: int | None) -> None:
    """No explanation is better than a wrong one."""
    found = explain_lines(lines, code)
    assert found.finding is None
    assert found.exception is None


def test_an_empty_log_says_something_only_with_exit_code_0() -> None:
    """An image that starts a shell ends so; an unknown exit code says nothing."""
    assert name(explain_lines([], 0)) == "image-starts-a-shell"
    assert name(explain_lines(["\n  "], 0)) == "image-starts-a-shell"
    assert name(explain_lines(["x"], 0)) is None


def test_symptoms_are_never_claimed() -> None:
    """No log shows wrong answers, whatever stands in it."""
    lines = [f"ERROR {row.name} {row.cause} {row.remedy}" for row in load_catalogue().symptoms]
    assert name(explain_lines(lines)) is None


def test_what_users_wrote_is_not_read() -> None:
    """A prompt may quote any error, and vLLM logs prompts if it is told to."""
    for line in (f"Request a details: prompt: '{LLVM}'", f"Generated response a: output: '{LLVM}'"):
        assert name(explain_lines([f"INFO 10-20 12:00:00 [request_logger.py:56] {line}"])) is None


def test_an_error_that_serving_outlived_is_none() -> None:
    """A download that was tried again, a request that failed: the engine went on."""
    assert name(explain_lines([OUT_OF_MEMORY, SERVING])) is None
    assert name(explain_lines([SERVING, OUT_OF_MEMORY])) == "device-out-of-memory"
    assert name(explain_lines([SERVING, OUT_OF_MEMORY, *[ANSWERED] * ANSWERS_AFTER])) is None
    later = explain_lines([SERVING, OUT_OF_MEMORY, *[ANSWERED] * ANSWERS_AFTER, OUT_OF_MEMORY])
    assert later.finding is not None
    assert later.finding.line == ANSWERS_AFTER + 3
    refused = "HfHubHTTPError: 429 Client Error: Too Many Requests"
    assert name(explain_lines([refused, "INFO Loading weights took 5.00 seconds"])) is None


def test_the_last_of_several_starts_is_explained() -> None:
    """A container's log holds every restart; the cause of an earlier one may be mended."""
    assert name(explain_lines([BANNER, LLVM, BANNER, OUT_OF_MEMORY])) == "device-out-of-memory"
    assert name(explain_lines([BANNER, LLVM, BANNER, "ValueError: odd"])) is None
    before = explain_lines([BANNER, LLVM, BANNER])
    assert name(before) == "flydsl-wide-lds-load"
    assert before.earlier_start
    assert name(explain_lines([BANNER, LLVM, BANNER], 1)) is None


def test_refused_requests_do_not_hide_the_reason() -> None:
    """Clients go on asking a dead engine, thousands of times."""
    refused = (
        '(APIServer pid=1) INFO:     10.0.0.7:5 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'
    )
    assert explain_lines(["ValueError: odd", *[refused] * 3000], 1).exception == "ValueError: odd"


def test_the_wrapper_is_not_the_reason() -> None:
    """Each process prints that another one failed; only one says why (vllm/v1/engine/utils.py)."""
    found = explain_lines(["(EngineCore pid=9) torch.cuda.SomeError: the reason: a kernel", WRAPPER], 1)
    assert found.exception == "torch.cuda.SomeError: the reason: a kernel"


def test_the_reason_of_a_validation_error() -> None:
    """As vLLM 0.32.0 prints a wrong flag: the line of the exception only counts errors."""
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, User-specified max_model_len (9) is greater than the derived max_model_len",
    ]
    found = explain_lines(lines, 1)
    assert found.exception is not None
    assert "max_model_len (9) is greater" in found.exception


@given(st.binary(max_size=300), st.none() | st.integers(-64, 255))
def test_any_log_gives_printable_lines(junk: bytes, exit_code: int | None) -> None:
    """A message goes into one line of a log, whatever the engine printed."""
    scanner = Scanner()
    scanner.feed(junk + b"\nValueError: " + junk + b"x" * 1000)
    found = explain(scanner.evidence(), exit_code)
    for text in (found.exception or "", *(error.text for error in found.errors)):
        assert text.isprintable()
        assert len(text) <= MAX_QUOTED


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-02 10:00:00 [x.py:3] if the port is busy you will see Address already in use",
        "(APIServer pid=7) WARNING 11-02 10:00:00 [x.py:3] no kernel image is available for gfx90a; skipping",
        "(EngineCore pid=7) DEBUG 11-02 10:00:00 [x.py:3] wrote: torch.OutOfMemoryError: HIP out of memory.",
    ],
)
def test_a_line_that_tells_of_nothing_serious_is_no_cause(line: str) -> None:
    """A wrong cause, told with confidence, costs more than none; and such lines quote what they like."""
    found = explain_lines([line, "ValueError: bad rope config"], 1)
    assert found.finding is None
    assert found.exception == "ValueError: bad rope config"


def test_an_engine_that_ended_well_died_of_nothing() -> None:
    """Exit code 0 is the engine's own word."""
    lines = ["ERROR 11-02 10:00:00 [x.py:3] template of a user: Fatal Python error: Segmentation fault"]
    found = explain_lines(lines, 0)
    assert found.finding is None
    assert [one.name for one in found.set_aside] == ["segmentation-fault"]
    assert explain_lines(lines, 1).finding is not None
    assert explain_lines(lines, 1).set_aside == ()


@pytest.mark.parametrize(
    "notice", [sample for sample in load_samples() if sample.row in NOTICES], ids=lambda sample: sample.row
)
def test_a_notice_is_no_cause_of_an_engine_that_served(notice: Sample) -> None:
    """Slow is not failed; an operator would mend what is not broken."""
    found = explain_lines([BANNER, *notice.lines, SERVING, *STOPPED])
    assert found.finding is None
    assert found.ended_well
    assert found.asked_to_end


def test_what_every_shutdown_prints_is_no_error() -> None:
    """As vLLM 0.32.0 ends on SIGTERM, and what ranks say of each other meanwhile."""
    noise = [
        "(EngineCore pid=9) ERROR 10-20 12:00:09 [x.py:3] Worker proc W-3 died unexpectedly (exit code: -9)",
        "[F1020 12:00:00.000000 ProcessGroupNCCL.cpp:1575] ProcessGroupNCCL's HeartbeatMonitor has been s",
        "torch.distributed.DistNetworkError: Broken pipe",
    ]
    found = explain_lines([BANNER, SERVING, *STOPPED, *noise])
    assert found.finding is None
    assert (found.others, found.errors, found.exception) == ((), (), None)
    assert found.ended_well


def test_a_crash_while_it_ends_is_one() -> None:
    """Requests are still answered then; and what failed before anybody asked stays a failure."""
    assert name(explain_lines([BANNER, SERVING, *STOPPED, LLVM])) == "flydsl-wide-lds-load"
    before = explain_lines([BANNER, SERVING, STOPPED[-2], *STOPPED])
    assert not before.ended_well
    assert before.others[0].name == "engine-dead"


def test_the_start_after_an_end_is_looked_at_afresh() -> None:
    """A container's log goes on with the next start."""
    assert [
        error.line for error in explain_lines([BANNER, SERVING, *STOPPED, BANNER, "ValueError: odd"]).errors
    ]


def test_an_orderly_end_without_a_signal() -> None:
    """What did not serve has not ended well, however politely."""
    assert explain_lines([SERVING, "INFO:     Application shutdown complete."]).ended_well
    assert not explain_lines(["INFO:     Application shutdown complete."]).ended_well
    assert not explain_lines([SERVING]).ended_well


def test_an_earlier_failure_is_not_that_of_a_start_that_ended_well() -> None:
    """It was mended, and asked about is the last one."""
    assert name(explain_lines([BANNER, LLVM, BANNER, SERVING, *STOPPED])) is None


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("10.0.0.7 - - [10/Oct/2026:13:55:36] GET /index.html 200", False),
        ("Error: something of another program", False),
        (BANNER, True),
        ("INFO 10-20 11:59:00 [x.py:1] well", True),
        ("kimi-k3: error: vLLM failed", True),
        (LLVM, True),
    ],
)
def test_whose_log_it_is(line: str, known: bool) -> None:
    """A wrong file is the commonest reason why nothing is found."""
    assert explain_lines([line]).is_vllm is known
