# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 plan``, as an operator and as a script use it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.cli import run
from kimi_k3.errors import OperatorError
from kimi_k3.plan.report import PerRank, Plan
from kimi_k3.plan.startable import require_startable
from kimi_k3.plan.view import BAR_WIDTH, MEMORY_ENDS, bar
from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.words.gpus import GIB, GPUS

CONFIG = Path(__file__).parents[1] / "checkpoint" / "data" / "k3-config.json"
ON_GPUS = [name for name in profile_names() if load_profile(name).gpu is not None]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but the published config.json."""
    directory = tmp_path_factory.mktemp("published")
    (directory / "config.json").write_bytes(CONFIG.read_bytes())
    return directory


@pytest.fixture
def checkpoint(published: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, for a command with nothing of the developer's in its environment."""
    for name in [name for name in os.environ if name.startswith("KIMI_K3_")]:
        monkeypatch.delenv(name)
    return published


def test_sizes_are_checked_together(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two numbers whose product must stay can only be changed at once."""
    both = ("--profile", "ep8", "--set", "tensor-parallel-size=4", "--set", "data-parallel-size=2")
    code, plan = planned(checkpoint, capsys, *both)
    assert (code, plan.ranks) == (0, 8)
    assert planned(checkpoint, capsys, *both, "--set", "data-parallel-size-local=2")[1] == plan
    assert run(["plan", str(checkpoint), "--set", "tensor-parallel-size=4"]) == 2
    assert "make the numbers equal" in capsys.readouterr().err
    settings = [f"--set={each}" for each in (*both[3::2], "data-parallel-size-local=1")]
    assert run(["plan", str(checkpoint), *settings]) == 2
    assert "2 data-parallel ranks on 1 node are 2 on each; give 2" in capsys.readouterr().err


def test_the_index_is_believed_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint with further tensors is read whole, whatever its config calls for."""
    (tmp_path / "config.json").write_bytes(CONFIG.read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 2 * 10**12}, "weight_map": {}})
    )
    plan = planned(tmp_path, capsys, "--profile", "tp8")[1]
    assert plan.storage.distinct_bytes == plan.storage.rank_bytes == 2 * 10**12


def test_a_file_is_no_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would become ``--model`` of the command that the plan prints."""
    assert run(["plan", str(checkpoint / "config.json")]) == 2
    assert "is a file; name the directory that holds config.json" in capsys.readouterr().err
    assert run(["plan", "/" + "a" * 5000]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_variable_that_nobody_knows(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would refuse it, so a plan must not go by as if it meant nothing."""
    monkeypatch.setenv("KIMI_K3_WEIGHTS", "mxfp4")
    assert run(["plan", str(checkpoint)]) == 2
    assert "KIMI_K3_WEIGHTS" in capsys.readouterr().err


def planned(checkpoint: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Plan]:
    code = run(["plan", str(checkpoint), "--json", *arguments])
    return code, Plan.model_validate_json(capsys.readouterr().out)


@pytest.mark.parametrize("profile", ["tp8", "ep8"])
def test_public_figures(checkpoint: Path, capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """192.51 GiB before the conversion, 201 after it, 27 KiB a token, 948,305 tokens of cache.

    They are those of vllm-project/vllm#51274. The profiles serve text only: without the image encoder's
    0.83 GiB there is 0.8 % less of weights, and 2.9 % more of cache.
    """
    code, plan = planned(
        checkpoint, capsys, "--profile", profile,
        "--set", "max-model-len=16384", "--set", "gpu-memory-utilization=0.97",
    )  # fmt: skip
    rank = plan.per_rank
    assert (code, plan.fits, plan.reasons) == (0, True, ())
    assert rank.resident_before_conversion_bytes / GIB == pytest.approx(192.51, rel=0.01)
    assert rank.resident_after_conversion_bytes / GIB == pytest.approx(201.5, rel=0.01)
    assert plan.kv.bytes_per_token == 27 * 1024
    assert plan.kv.tokens == pytest.approx(948_305, rel=0.05)


def test_eight_mi300x(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the numbers, and with the profile to take instead."""
    code, plan = planned(checkpoint, capsys, "--profile", "tp8", "--gpu", "mi300x")
    assert (code, plan.fits) == (1, False)
    assert "weights take up to 201.0 GiB" in plan.reasons[0]
    assert "a mi300x has 192.0 GiB" in plan.reasons[0]
    assert "--profile pp2-tp8 fits" in plan.reasons[-1]
    assert plan.kv.tokens is None


@pytest.mark.parametrize("profile", ON_GPUS)
def test_every_profile_fits_what_it_is_for(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], profile: str
) -> None:
    """A profile that its own plan refuses would be one that nobody planned."""
    code, plan = planned(checkpoint, capsys, "--profile", profile)
    assert (code, plan.reasons) == (0, ())
    assert plan.gpu in GPUS
    assert plan.ranks == plan.nodes * 8
    assert plan.argv[1:4] == ("-P", "-m", "vllm.entrypoints.openai.api_server")
    assert plan.env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == str(plan.budgets["execute_model"])
    assert plan.env["VLLM_ENGINE_READY_TIMEOUT_S"] == str(plan.budgets["engine_ready"])


def test_the_wrong_architecture(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was tuned for gfx942 must not be started on gfx950, where MXFP4 needs no conversion."""
    code, plan = planned(checkpoint, capsys, "--profile", "ep8", "--gpu", "mi355x")
    assert code == 1
    assert plan.reasons[0] == "profile ep8 is for gfx942, mi355x is gfx950"


def test_on_a_cpu_the_machine_must_hold_it(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real checkpoint with the profile of the toy."""
    code, plan = planned(checkpoint, capsys, "--profile", "cpu-tiny")
    assert code == 1
    assert "weights and cache take at least 1453.8 GiB" in plan.reasons[0]
    assert (plan.gpu, plan.per_rank.gpu_bytes) == (None, None)


def test_slow_storage(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A start whose reading alone outlasts its budget is ended by that, without an error anywhere."""
    code, plan = planned(checkpoint, capsys, "--profile", "ep8", "--storage", "0.2")
    assert code == 1
    assert "reading alone takes 7805 s at 0.2 GB/s, a start may take 7200 s" in plan.reasons[0]
    assert planned(checkpoint, capsys, "--profile", "ep8", "--storage", "3.1")[0] == 0


def test_consent_is_planned_and_not_assumed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that is copied from a plan must not consent in the operator's place."""
    plan = planned(checkpoint, capsys)[1]
    assert plan.env["KIMI_K3_ACCEPT_LOSSY"] == "0"
    assert any("--accept-lossy" in note for note in plan.notes)
    plan = planned(checkpoint, capsys, "--accept-lossy")[1]
    assert plan.env["KIMI_K3_ACCEPT_LOSSY"] == "1"
    assert not any("--accept-lossy" in note for note in plan.notes)


def test_for_people(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict first, the command last, every line whole in a pipe."""
    assert run(["plan", str(checkpoint), "--profile", "pp2-tp8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pp2-tp8, int4 experts, 16 x mi300x on 2 nodes: fits"
    assert lines[-2].startswith("exec ")
    assert any("--nnodes 2 --node-rank 0 --master-addr FIRST_NODE" in line for line in lines)
    assert any("this is node 0 of 2" in line for line in lines)
    assert "export KIMI_K3_WEIGHTS=int4" in lines


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--profile", "ep9"], "did you mean"),
        (["--gpu", "mi325"], "did you mean 'mi325x'?"),
        (["--gpu", "mi325x", "--profile", "cpu-tiny"], "runs on a CPU"),
        (["--set", "max-model-length=1"], "did you mean 'max-model-len'?"),
        (["--set", "max-model-len"], "has no value; write --set max-model-len=VALUE"),
        (["--set", "max-model-len="], "has no value; write --set max-model-len=VALUE"),
        (["--set", "max-model-len=-1"], "'max-model-len=-1': must be a whole number; give one from 1 to"),
        (["--set", "max-model-len=1e5"], "must be a whole number; give one from 1 to"),
        (["--set", f"max-model-len={10**400}"], "must be a whole number; give one from 1 to"),
        (["--set", "max-num-seqs=0"], "must be a whole number; give one from 1 to"),
        (["--set", "max-num-seqs=300"], "'max-num-seqs=300': must be at most 256, since"),
        (["--set", "max-num-batched-tokens=1.5"], "must be a whole number; give one from 1 to"),
        (["--set", "max-num-batched-tokens=1"], "'max-num-batched-tokens=1': is less than --max-num-seqs 64"),
        (["--set", "block-size=7"], "must be a multiple of 16"),
        (["--profile", "cpu-tiny", "--set", "block-size=32"], "must be 16, for which the CPU's MLA kernel"),
        (["--set", "max-model-len=8", "--set", "max-model-len=9"], "max-model-len is given twice"),
        (["--set", "compilation-config={}"], "profile ep8 leaves --compilation-config alone (vLLM's default"),
        (["--set", "compilation-config={}"], "leave it out, or write a profile"),
        (["--profile", "mi355x-native", "--set", "compilation-config=[]"], "must be a JSON object"),
        (["--set", "dtype=true"], "--dtype needs a value"),
        (["--set", "reasoning-parser=null"], "--reasoning-parser needs a value"),
        (["--set", "dtype=bf16"], "did you mean 'bfloat16'?"),
        (["--set", "logprobs-mode=processed"], "did you mean 'processed_logits'?"),
        (["--set", "expert-parallel=8"], "must be true or false"),
        (["--set", "pipeline-parallel-size=0"], "must be a whole number; give one from 1 on"),
        (["--set", "start-timeout=-1"], "'start-timeout=-1': must be a whole number of seconds"),
        (["--set", "language-model-only=7"], "is a switch; write =true or =false"),
        (["--set", "gpu-memory-utilization=nan"], "must be a number; give one, e.g. 0.9"),
        (["--set", "gpu-memory-utilization=1.5"], "'gpu-memory-utilization=1.5': must be more than 0"),
        (["--storage", "1e-30"], "--storage 1e-30"),
        (["--set", "gpu-memory-utilization=high"], "must be a number; give one, e.g. 0.9"),
        (["--set", "tensor-parallel-size=7"], "--set 'tensor-parallel-size=7'"),
        (["--set", "weights=int5"], "'weights=int5': there is no such choice; did you mean 'int4'?"),
        (["--set", "start-timeout=0"], "nothing starts in no time"),
        (["--set", "start-timeout=soon"], "--set 'start-timeout=soon'"),
        (["--set", "max-model-len=2000000"], "1048576 positions"),
        (["--storage", "0"], "--storage 0.0"),
        (["--storage", "nan"], "--storage nan"),
    ],
)
def test_a_wrong_value_is_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    """In one line, with the nearest name where there is one."""
    assert run(["plan", str(checkpoint), *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
    assert "Input should" not in error


def test_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped path, or a mount that is empty."""
    assert run(["plan", str(tmp_path / "nothing")]) != 0
    assert "config.json cannot be read" in capsys.readouterr().err


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "max-model-len": st.integers(1, 1_048_576),
        "max-num-seqs": st.integers(1, 256),
        # Not less than the most requests, which vLLM would refuse.
        "max-num-batched-tokens": st.integers(256, 65_536),
        "gpu-memory-utilization": st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.97]),
        "start-timeout": st.integers(1, 100_000),
        "drain-timeout": st.integers(0, 10_000),
    },
)


@given(profile=st.sampled_from(ON_GPUS), gpu=st.sampled_from(sorted(GPUS)), changes=SETTINGS)
@settings(max_examples=20, deadline=None)
def test_a_plan_adds_up(published: Path, profile: str, gpu: str, changes: dict[str, Any]) -> None:
    """For any override: parts and whole, promises and budgets, and a verdict that agrees with them."""
    from kimi_k3.plan import command
    from kimi_k3.plan.options import Options

    seen: list[Plan] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_print", lambda plan, script, *, as_json: seen.append(plan))
        code = command.run_plan(
            command.Request(
                options=Options(
                    checkpoint=published,
                    host="127.0.0.1",
                    port=8000,
                    served_model_name="k",
                    settings=tuple(f"{name}={value}" for name, value in changes.items()),
                ),
                profile=profile,
                gpu=gpu,
                gigabytes_per_second=None,
                as_json=True,
            )
        )
    (plan,) = seen
    rank, kv, times = plan.per_rank, plan.kv, plan.budgets
    assert plan.fits is (code == 0) is (not plan.reasons)
    assert rank.weights_bytes == rank.resident_after_conversion_bytes <= rank.conversion_peak_bytes
    assert rank.weights_bytes == (
        rank.expert_bytes_after_conversion + rank.sharded_bytes + rank.replicated_bytes + rank.vision_bytes
    )
    if plan.fits:
        assert rank.gpu_bytes == rank.weights_bytes + sum(
            part or 0
            for part in (
                rank.process_estimated_bytes,
                rank.step_estimated_bytes,
                rank.cache_bytes,
                rank.withheld_bytes,
            )
        )
        assert kv.tokens is not None
        assert kv.largest_max_model_len is not None
        assert kv.max_model_len <= kv.largest_max_model_len
        assert kv.largest_max_num_seqs is not None
        assert kv.largest_max_num_seqs >= 1
    assert times["startup_probe"] > times["engine_ready"] > times["startup"]
    assert times["termination_grace"] >= times["readiness_delay"] + times["drain"] + 15
    assert json.loads(plan.model_dump_json())["fits"] is plan.fits


def test_the_bar_is_as_long_as_the_memory(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture that does not add up is worse than none."""
    rank: PerRank = planned(checkpoint, capsys)[1].per_rank
    assert rank.gpu_bytes is not None
    signs = "".join(signs for signs, _ in bar(rank, rank.gpu_bytes))
    assert len(signs) == BAR_WIDTH
    assert MEMORY_ENDS not in signs


def test_the_bar_of_what_does_not_fit(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """219.2 of 192.0 GiB: the end of the memory stands where it is, and the rest behind it."""
    rank: PerRank = planned(checkpoint, capsys, "--profile", "tp8", "--gpu", "mi300x")[1].per_rank
    assert rank.gpu_bytes is not None
    signs = "".join(signs for signs, _ in bar(rank, rank.gpu_bytes))
    assert len(signs) == BAR_WIDTH
    assert signs.index(MEMORY_ENDS) / BAR_WIDTH == pytest.approx(192.0 / 219.2, abs=1 / BAR_WIDTH)
    assert run(["plan", str(checkpoint), "--profile", "tp8", "--gpu", "mi300x"]) == 1
    assert "  | the memory ends: 27.2 GiB are missing" in capsys.readouterr().out


def test_in_a_narrow_terminal(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 columns, as in a split window: only the script, which is for copying, may be wider."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    for arguments in (["--profile", "dp-ep16"], ["--profile", "tp8", "--gpu", "mi300x"]):
        run(["plan", str(checkpoint), *arguments])
        told = capsys.readouterr().out.partition("\n(\n")[0]
        lines = re.sub(r"\x1b\[[0-9;]*m", "", told).splitlines()
        assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("profile", profile_names())
def test_whether_it_can_be_started_is_said(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], profile: str
) -> None:
    """What serve refuses must not look, in a plan, as if it could be had; it fits all the same."""
    plan = planned(checkpoint, capsys, "--profile", profile)[1]
    told = [note for note in plan.notes if note.startswith(f"kimi-k3 serve cannot start profile {profile}")]
    if plan.startable:
        assert not told
        require_startable(load_profile(profile))
        return
    with pytest.raises(OperatorError) as caught:
        require_startable(load_profile(profile))
    assert caught.value.what.partition(": ")[2] in told[0]


def test_reasons_of_what_an_operator_set(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile's reason for another value is a false one; its other figures are of its own GPUs."""
    assert run(["plan", str(checkpoint), "--set", "max-model-len=65536"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# --max-model-len: set by the operator" in lines
    assert not any("reasons beside flags" in line for line in lines)
    for change in (("--gpu", "mi300x"), ("--set", "weights=mxfp4")):
        notes = planned(checkpoint, capsys, *change)[1].notes
        assert any(note.startswith("the reasons beside flags are the profile's own") for note in notes)


def test_small_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The toy's weights are not 0.00 GiB."""
    make_tiny_checkpoint(tmp_path / "tiny")
    run(["plan", str(tmp_path / "tiny"), "--profile", "cpu-tiny"])
    told = capsys.readouterr().out
    assert "weights after it: 13.84 MiB" in told
    assert "cache of a rank: a token: 4.5 KiB" in told
    assert "0.00 GiB" not in told


def test_the_script_can_be_pasted(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the shell nor its variables are changed, and consent has its place."""
    run(["plan", str(checkpoint)])
    script = capsys.readouterr().out.partition("\n(\n")[2]
    assert "export KIMI_K3_ACCEPT_LOSSY=0  # consent goes here" in script
    stub = "mkdir() { :; }; exec() { echo started $KIMI_K3_WEIGHTS; }\n(\n"
    pasted = f"{stub}{script}\necho after:$KIMI_K3_WEIGHTS:"
    done = subprocess.run(["bash"], input=pasted, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["started int4", "after::"]
    run(["plan", str(checkpoint), "--accept-lossy"])
    assert "consent goes here" not in capsys.readouterr().out
