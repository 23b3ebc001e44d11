# SPDX-License-Identifier: Apache-2.0
"""The supervisor's decisions: phases, acceptance, verdicts, lines. No processes."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.diagnosis.match import explain_lines
from kimi_k3.errors import ExitCode
from kimi_k3.journal.models import (
    CheckpointSummary,
    FailureRecord,
    KernelProof,
    PhaseChange,
    ProjectionConversion,
    RankRecord,
    SupervisorRecord,
)
from kimi_k3.journal.reader import Journal
from kimi_k3.supervisor.acceptance import objection
from kimi_k3.supervisor.announced import Announced
from kimi_k3.supervisor.follow import _summaries
from kimi_k3.supervisor.nodes import Hearing, lost_node
from kimi_k3.supervisor.phases import LOG_SIGNS, bar_of, latest, sign_of, starting_phase
from kimi_k3.supervisor.redact import HIDDEN, MAX_LINE, Lines, Secrets
from kimi_k3.supervisor.serve import engine_url
from kimi_k3.supervisor.verdict import death, hung, lost_process, too_slow
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import Projection, Requantisation, ScaleRule, Weights
from tests.sidecar import builders
from tests.wheels import VERSIONS, vllm_source

NOW = datetime(2026, 11, 30, tzinfo=UTC)
LOG = Path("/state/engine.log")
MOE_LAYERS = (1, 2)
KEYS = [(layer, projection) for layer in MOE_LAYERS for projection in Projection]
MSE = Requantisation(rule=ScaleRule.MSE, negative_scale=True, allow_nonfinite=False)
AMAX = Requantisation(rule=ScaleRule.AMAX, negative_scale=False, allow_nonfinite=False)
POSITIVE = MSE.model_copy(update={"negative_scale": False})
LENIENT = MSE.model_copy(update={"allow_nonfinite": True})
PHASES = st.sampled_from([Phase.LOADING, Phase.CONVERTING])
STARTED = st.sampled_from([Phase.LOADING, Phase.CONVERTING, Phase.COMPILING, Phase.CAPTURING, Phase.WARMING])


def asked(weights: Weights = Weights.INT4, ranks: int = 2) -> SupervisorRecord:
    return SupervisorRecord(
        start_id="s1",
        pid=1,
        started_at=NOW,
        updated_at=NOW,
        profile="p",
        checkpoint=CheckpointSummary(
            name="k3", total_bytes=1, shards=1, decoder_layers=3, moe_layers=MOE_LAYERS, experts=4
        ),
        served_model_name="kimi-k3",
        weights=weights,
        requantisation=MSE if weights.lossy else None,
        consent=None,
        world_size=ranks,
        engine_url="http://127.0.0.1:8000",
    )


def conversion(layer: int, projection: Projection) -> ProjectionConversion:
    return ProjectionConversion(
        layer=layer,
        projection=projection,
        started_at=NOW,
        ended_at=NOW,
        experts=4,
        bytes_read=1,
        bytes_written=1,
        groups=1,
        lossless_groups=0,
        zero_groups=0,
        nonfinite_groups=0,
        clamped_groups=0,
        squared_error=0.0,
        energy=1.0,
        max_error=0.0,
        worst_expert=0,
        worst_expert_relative_mse=0.005,
    )


def rank(
    number: int,
    *,
    weights: Weights = Weights.INT4,
    requantisation: Requantisation | None = MSE,
    keys: list[tuple[int, Projection]] | None = None,
    phase: Phase = Phase.CONVERTING,
    start_id: str = "s1",
) -> RankRecord:
    if keys is None:
        keys = KEYS if weights.lossy else []
    return RankRecord(
        start_id=start_id,
        rank=number,
        pid=10 + number,
        updated_at=NOW,
        weights=weights,
        requantisation=requantisation,
        phases=(PhaseChange(phase=phase, at=NOW),),
        conversions=tuple(conversion(*key) for key in keys),
    )


EXACT = Weights.MXFP4


def wrong_signs(number: int, requantisation: Requantisation) -> RankRecord:
    """A rank whose kernel gets negative scales wrong."""
    proof = KernelProof(relative_error=0.004, relative_error_with_signs=None, signs_right=False)
    return rank(number, requantisation=requantisation).model_copy(update={"proof": proof})


def by_itself() -> SupervisorRecord:
    """A start without the plugin."""
    return asked(EXACT).model_copy(update={"ranks_report": False})


@pytest.mark.parametrize(
    ("record", "ranks", "part"),
    [
        (asked(), [rank(0), rank(1)], None),
        (
            asked(EXACT),
            [rank(0, weights=EXACT, requantisation=None), rank(1, weights=EXACT, requantisation=None)],
            None,
        ),
        (asked(), [], "no report of rank 0, 1"),
        (asked(), [rank(1)], "no report of rank 0"),
        (asked(), [rank(0), rank(1, start_id="old")], "no report of rank 1"),
        (asked(), [rank(0), rank(1), rank(2)], "rank 2 reported"),
        (asked(), [rank(0), rank(1, weights=EXACT)], "rank 1 serves mxfp4 weights, int4 was asked"),
        (asked(EXACT), [rank(0), rank(1)], "rank 0 serves int4 weights, mxfp4 was asked"),
        (asked(), [rank(0), rank(1, requantisation=AMAX)], "scale rule amax, scale rule mse was asked"),
        (
            asked(),
            [rank(0), rank(1, requantisation=POSITIVE)],
            "no negative scales, scale rule mse was asked",
        ),
        (asked(), [rank(0), rank(1, requantisation=LENIENT)], "non-finite groups allowed, scale rule mse"),
        (asked(), [rank(0), rank(1, requantisation=None)], "converted with no scale rule"),
        (asked(), [wrong_signs(0, POSITIVE), wrong_signs(1, POSITIVE)], None),
        (asked(), [wrong_signs(0, MSE), wrong_signs(1, MSE)], "no negative scales was asked"),
        (asked(), [rank(0), wrong_signs(1, POSITIVE)], "kernel of rank 1 computes negative scales wrongly"),
        (by_itself(), [], None),
        (by_itself(), [rank(0)], "rank 0 reported, but only 0 ranks should"),
        (asked(), [rank(0, keys=KEYS[1:]), rank(1)], "rank 0 did not convert w13 of layer 1"),
        (asked(), [rank(0, keys=[]), rank(1)], "and 3 more"),
        (asked(), [rank(0, keys=[*KEYS, KEYS[0]]), rank(1)], "more than once w13 of layer 1"),
        (asked(), [rank(0, keys=[*KEYS, (0, Projection.W2)]), rank(1)], "unasked w2 of layer 0"),
        (
            asked(EXACT),
            [rank(0, weights=EXACT, requantisation=None, keys=KEYS[:1]), rank(1, weights=EXACT)],
            "rank 0 converted unasked w13 of layer 1",
        ),
    ],
)
def test_only_a_complete_and_matching_report_is_accepted(
    record: SupervisorRecord, ranks: list[RankRecord], part: str | None
) -> None:
    """vLLM swallows a plugin's exception and goes on, so whatever is not said did not happen."""
    found = objection(record, [rank.summary() for rank in ranks])
    if part is None:
        assert found is None
    else:
        assert found is not None
        assert part in found


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Loading safetensors checkpoint shards:   1% Completed | 1/96", Phase.LOADING),
        (
            "(Worker_TP0 pid=1) INFO [default_loader.py:501] Loading weights took 0.5 seconds",
            Phase.CONVERTING,
        ),
        ("INFO Model loading took 201.5 GiB memory and 600.000000 seconds", Phase.COMPILING),
        ("INFO [backbone] torch.compile took 40.00 s in total", Phase.COMPILING),
        ("Capturing CUDA graphs (decode, FULL):  10%|#", Phase.CAPTURING),
        ("INFO Graph capturing finished in 20 secs, took 1.00 GiB", Phase.CAPTURING),
        ("INFO init engine (profile, create kv cache, warmup model) took 99.00 s", Phase.WARMING),
        ("INFO Starting vLLM server on http://0.0.0.0:8000", Phase.WARMING),
        ("INFO anything else", None),
    ],
)
def test_lines_of_vllm_that_tell_a_phase(line: str, phase: Phase | None) -> None:
    """As vLLM 0.32.0 prints them, behind whatever prefix."""
    sign = sign_of(line)
    assert (None if sign is None else sign.phase) is phase


@pytest.mark.parametrize("version", VERSIONS)
def test_the_lines_stand_in_vllms_source(version: str) -> None:
    """A line that was reworded would only make a phase disappear, which nobody notices."""
    text = "".join(
        path.read_text(errors="replace")
        for folder in ("v1", "model_executor/model_loader", "compilation", "entrypoints")
        for path in (vllm_source(version) / folder).rglob("*.py")
    )
    text = re.sub(r'"\s+"', "", text)  # literals that are written in pieces
    assert [
        sign.text for sign in LOG_SIGNS if sign.text not in text and not sign.text.startswith("kimi-k3")
    ] == []
    assert "[shutdown] Executor: waiting for worker exit" in text


@given(
    present=STARTED,
    phases=st.lists(PHASES, max_size=3),
    done=st.integers(0, 4),
    log=st.none() | STARTED,
    healthy=st.booleans(),
)
def test_a_start_never_goes_back(
    present: Phase, phases: list[Phase], done: int, log: Phase | None, healthy: bool
) -> None:
    """Whatever arrives in whatever order, and nothing but the canary makes a start ready."""
    ranks = [rank(number, phase=phase, keys=KEYS[:done]) for number, phase in enumerate(phases)]
    found = starting_phase(
        present, ranks=ranks, world_size=2, expected_conversions=lambda _: 4, log=log, healthy=healthy
    )
    assert present.position <= found.position < Phase.READY.position


@pytest.mark.parametrize(
    ("ranks", "log", "healthy", "phase"),
    [
        ([], None, False, Phase.LOADING),
        ([rank(0)], None, False, Phase.LOADING),
        ([rank(0), rank(1, phase=Phase.LOADING)], None, False, Phase.LOADING),
        ([rank(0), rank(1)], None, False, Phase.CONVERTING),
        ([rank(0), rank(1)], Phase.COMPILING, False, Phase.COMPILING),
        ([rank(0), rank(1, keys=KEYS[:1])], Phase.COMPILING, False, Phase.CONVERTING),
        ([rank(0), rank(1)], Phase.WARMING, False, Phase.WARMING),
        ([], None, True, Phase.WARMING),
    ],
)
def test_the_slowest_rank_is_where_the_start_is(
    ranks: list[RankRecord], log: Phase | None, healthy: bool, phase: Phase
) -> None:
    """ "Model loading took" of one rank does not end the conversion of the others."""
    found = starting_phase(
        Phase.LOADING, ranks=ranks, world_size=2, expected_conversions=lambda _: 4, log=log, healthy=healthy
    )
    assert found is phase


def test_latest_of_nothing() -> None:
    """A start of which nothing is known has not begun."""
    assert latest(None) is Phase.PENDING


FAILURE = FailureRecord(start_id="s1", pid=2, at=NOW, what="the kernel is missing", remedy="install it")
OUT_OF_MEMORY = "torch.OutOfMemoryError: HIP out of memory"


@pytest.mark.parametrize(
    ("failures", "tail", "exit_code", "part"),
    [
        ([FAILURE], [OUT_OF_MEMORY], -9, "the kernel is missing; install it"),
        ([], [OUT_OF_MEMORY], -9, "a GPU's memory is full"),
        ([], ["ValueError: odd"], -9, "out-of-memory killer"),
        ([], ["ValueError: odd"], -7, "/dev/shm"),
        ([], ["ValueError: odd"], 1, "ValueError: odd"),
        ([], [], 1, "with exit code 1"),
        ([], ["INFO bye"], 0, "it ended without an error"),
    ],
)
def test_the_best_explanation_of_a_death(
    failures: list[FailureRecord], tail: list[str], exit_code: int, part: str
) -> None:
    """What a process said of itself, then the catalogue, then the signal, then the last exception."""
    error = death(
        phase=Phase.CONVERTING,
        seconds=12.4,
        exit_code=exit_code,
        failures=failures,
        found=explain_lines(tail, exit_code),
        log=LOG,
    )
    assert "vLLM failed in phase converting after 12 s" in str(error)
    assert part in str(error)
    assert error.exit_code is ExitCode.ENGINE


def test_verdicts_name_the_phase_and_the_log() -> None:
    """An operator continues from the line alone."""
    slow = partial(too_slow, phase=Phase.WARMING, seconds=601, timeout=600, in_phase=20, asked=True, log=LOG)
    for part in ("601 s", "--start-timeout 600", "in phase warming", "first completion", str(LOG)):
        assert part in str(slow(absent=[]))
    assert "node 1, 3 has not joined" in str(slow(absent=[1, 3]))
    who = "EngineCore (pid 5)"
    lost = str(lost_process(who=who, phase=Phase.READY, seconds=9, found=explain_lines([]), log=LOG))
    for part in ("while serving", who + " is gone", "dmesg"):
        assert part in lost
    stuck = str(hung(phase=Phase.READY, seconds=400, stopped=None, timeout=360, log=LOG))
    for part in ("while serving", "no progress", "400 s", "--hang-timeout 360", str(LOG)):
        assert part in stuck
    frozen = str(hung(phase=Phase.READY, seconds=400, stopped="Worker_TP0 (pid 5)", timeout=360, log=LOG))
    assert "Worker_TP0 (pid 5) is stopped" in frozen


SECRET = "sk-horse"


@given(
    lines=st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=20),
        max_size=10,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=5),
)
def test_lines_survive_any_cut_of_the_stream(lines: list[str], cuts: list[int]) -> None:
    """A pipe gives bytes in pieces that end anywhere, in the middle of a character or of the key."""
    wanted = [line + SECRET for line in lines]
    data = "\n".join(wanted).encode()
    splitter, begin = Lines(Secrets([SECRET])), 0
    found: list[str] = []
    for cut in [*sorted(cuts), len(data)]:
        found += splitter.feed(data[begin:cut])
        begin = max(begin, cut)
    found += splitter.finish()
    assert found == [line.replace(SECRET, HIDDEN) for line in wanted]


@given(st.integers(MAX_LINE - 20, MAX_LINE + 20))
def test_no_part_of_a_key_survives_the_cut_of_a_long_line(before: int) -> None:
    """A line is cut at a length, and a key may lie across it."""
    splitter = Lines(Secrets([SECRET]))
    found = [*splitter.feed(b"x" * before + SECRET.encode() + b"y" * 1000 + b"\nnext\n")]
    assert found[1] == "next"
    assert len(found[0]) <= MAX_LINE + len(" [cut]") + len(SECRET)
    assert "sk-" not in found[0]


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("GET / Authorization: Bearer sk-abc.def", "GET / Authorization: Bearer ***"),
        ("[(b'authorization', b'Bearer sk-abc')]", "[(b'authorization', b'Bearer ***')]"),
        ("{'Authorization': 'Basic dXNlcg=='}", "{'Authorization': 'Basic ***'}"),
        ("vllm serve --api-key sk-abc --port 1", "vllm serve --api-key *** --port 1"),
        ("['--api-key', 'sk-abc', '--port']", "['--api-key', '***', '--port']"),
        ("args: {'api_key': ['sk-abc'], 'port': 1}", "args: {'api_key': ['***'], 'port': 1}"),
        ("cloning with hf_abcdefghijklmnopqrstuv.", "cloning with ***."),
        ("token t0ps3cretvalue was refused", "token *** was refused"),
        ("give --api-key-file /run/key", "give --api-key-file /run/key"),
        (
            "Authorization header is missing, api_key is None",
            "Authorization header is missing, api_key is None",
        ),
        ("  indented   stays,\ttoo", "  indented   stays,\ttoo"),
    ],
)
def test_what_has_the_shape_of_a_secret_is_hidden(line: str, printed: str) -> None:
    """A key need not be ours to be one; everything else of a line passes unchanged."""
    environment = {"HF_TOKEN": "t0ps3cretvalue", "VLLM_API_KEY": "is", "OTHER": "Authorization"}
    assert list(Lines(Secrets.of(None, environment)).feed(line.encode() + b"\n")) == [printed]
    assert Secrets.of(None, environment).hide(printed) == printed


def test_progress_bars_are_lines() -> None:
    """They redraw with a carriage return; blank lines between are noise."""
    assert list(Lines(Secrets()).feed(b"\r 1%\r 2%\r\n\nend\n")) == [" 1%", " 2%", "end"]


@pytest.mark.parametrize(
    ("host", "secure", "url"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:1"),
        ("0.0.0.0", False, "http://127.0.0.1:1"),
        ("::", True, "https://[::1]:1"),
        ("node7", True, "https://node7:1"),
    ],
)
def test_where_this_machine_reaches_the_engine(host: str, secure: bool, url: str) -> None:
    """Nobody can connect to "everywhere"."""
    assert engine_url(host, 1, secure=secure) == url


def test_a_rank_may_speak_through_the_log() -> None:
    """Where the state directory is full, a line of the engine's output is what a rank has left."""
    announced = Announced()
    summary = rank(1).summary()
    announced.take(f"(Worker_TP1 pid=7) {summary.line()}")
    announced.take("(Worker_TP0 pid=6) INFO Model loading took 0.5 GiB memory and 1.000000 seconds")
    announced.take("(Worker_TP0 pid=6) kimi-k3: rank summary: {half a li")
    assert announced.summaries == {1: summary}
    assert announced.phase is Phase.COMPILING
    assert objection(asked(), [rank(0).summary(), *announced.summaries.values()]) is None


def test_vllm_ends_its_processes() -> None:
    """It may wait seconds for those that are left, while nobody hears that one is missing."""
    told = Announced()
    told.take("(Worker_TP0 pid=6) INFO shutdown timeout is 30 s")
    assert not told.shuts_down
    told.take("(EngineCore pid=7) INFO 12-01 [x.py:479] [shutdown] Executor: waiting for worker exit count=1")
    told.take("(EngineCore pid=7) INFO 12-01 anything")
    assert told.shuts_down


def test_steps_within_a_phase() -> None:
    """Profiling and capturing take minutes in which the phase alone says nothing."""
    told = Announced()
    told.take("INFO Model loading took 201.5 GiB memory and 600.000000 seconds")
    assert told.step is not None
    assert (told.step.phase, told.step.name, told.step.total) == (Phase.COMPILING, "profiling memory", None)
    began = told.step.since
    told.take("INFO Model loading took 201.5 GiB memory and 601.000000 seconds")
    assert told.step.since == began
    told.take(
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/51 [00:00<?, ?it/s]"
    )
    told.take("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  39%|███▉      | 20/51 [00:02<00:03]")
    assert told.phase is Phase.CAPTURING
    assert told.step.name == "capturing graphs (mixed prefill-decode, PIECEWISE)"
    assert (told.step.done, told.step.total) == (20, 51)
    told.take("INFO torch.compile took 40.00 s in total")
    assert told.step.name.startswith("capturing"), "what is announced late is nothing new"
    told.take("INFO Graph capturing finished in 20 secs, took 1.00 GiB")
    assert (told.step.name, told.step.done) == ("warming up kernels", None)


@pytest.mark.parametrize(
    ("line", "bar"),
    [
        ("Capturing CUDA graphs (FULL): 100%|██████████| 35/35 [00:01<00:00, 30.1it/s]", ("FULL", 35, 35)),
        ("\x1b[32mCapturing CUDA graphs:  50%|#####     | 1/2", ("graphs", 1, 2)),
        ("Capturing CUDA graphs (FULL): 35", None),
        ("Capturing CUDA graphs (FULL): 10%|#| x/y", None),
    ],
)
def test_progress_bars(line: str, bar: tuple[str, int, int] | None) -> None:
    """Both model runners' bars, and what only looks like one."""
    assert bar_of(line) == bar


def test_a_node_is_silent_by_a_clock_that_nobody_sets() -> None:
    """A clock that is set forward by an hour ends no start; a node that says nothing for long does."""
    hearing = Hearing()
    seen = Journal(supervisor=None, ranks=(), failures=(), faults=(), nodes=(builders.node(1),))
    assert hearing.silences(seen, 100.0) == {1: 0.0}
    later = replace(seen, nodes=(builders.node(1, heard_at=builders.node(1).heard_at + timedelta(hours=1)),))
    assert hearing.silences(later, 101.0) == {1: 0.0}
    silences = hearing.silences(later, 161.0)
    assert silences == {1: 60.0}
    assert lost_node(later, silences, patience=61) is None
    assert lost_node(later, silences, patience=59) == "nothing was heard of node 1 for 60 s"
    full = replace(later, unwritable="has no room")
    assert hearing.silences(full, 4000.0) == {1: 0.0}
    assert hearing.silences(later, 4000.5) == {1: 0.5}, "counted from when there was room again"


def test_what_another_nodes_ranks_said_counts_where_they_could_not_write() -> None:
    """A full directory on one of the nodes does not end a start; what its ranks last wrote there is old."""
    other = builders.rank(1)
    said = other.summary().model_copy(update={"signs_refused": True})
    told = builders.node(1).model_copy(update={"summaries": (said,)})
    seen = Journal(supervisor=None, ranks=(builders.rank(0), other), failures=(), faults=(), nodes=(told,))
    assert _summaries(seen, Announced()) == [builders.rank(0).summary(), said]
