# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest

from kimi_k3.host import HostMemory, MachineMemory
from kimi_k3.journal.models import (
    Ending,
    KernelProof,
    Loading,
    MemoryReading,
    PhaseChange,
    PlannedMemory,
    Step,
)
from kimi_k3.journal.reader import Fault, Journal
from kimi_k3.sidecar.acknowledgement import Acknowledgements
from kimi_k3.sidecar.examples import MACHINE
from kimi_k3.sidecar.metrics import METRICS
from kimi_k3.sidecar.samples import Observation, samples
from kimi_k3.sidecar.view import EngineHealth, EngineOutcome
from kimi_k3.sidecar.warning import matters
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import Requantisation, ScaleRule

from .builders import (
    NOW,
    all_conversions,
    at,
    health,
    journal,
    lossless,
    lossy,
    lossy_rank,
    lossy_supervisor,
    phases,
    rank,
    supervisor,
)

PLANNED = PlannedMemory(weights_bytes=1, transient_bytes=2, step_bytes=None, kv_cache_bytes=3, limit_bytes=4)
NOTHING = MachineMemory(HostMemory(total_bytes=None, available_bytes=None, shmem_bytes=None), None, None, ())


def values(seen: Journal, answer: EngineHealth | None = None) -> dict[tuple[str, ...], float]:
    """Series by name and label values."""
    observation = Observation(journal=seen, health=answer, machine=NOTHING, now=NOW)
    found = [((one.metric.name, *one.labels), one.value) for one in samples(observation)]
    assert len(dict(found)) == len(found), "one series was given twice"
    return dict(found)


def test_unknown_is_absent() -> None:
    """An empty state directory yields what the sidecar knows itself, and no zeros for the rest."""
    names = {key[0] for key in values(journal(None))}
    assert names == {
        "kimi_k3_build_info",
        "kimi_k3_journal_faults",
        "kimi_k3_ready",
        "kimi_k3_warnings",
        "kimi_k3_warnings_unacknowledged",
    }


def test_ready() -> None:
    """1 needs an answer of the engine; without one it is unknown unless the journal says no."""
    assert values(lossless(), health())[("kimi_k3_ready",)] == 1
    assert values(lossless(), health(EngineOutcome.TIMEOUT))[("kimi_k3_ready",)] == 0
    assert ("kimi_k3_ready",) not in values(lossless())
    assert ("kimi_k3_engine_healthy",) not in values(lossless())
    draining = journal(supervisor(phases=phases(Phase.DRAINING)))
    assert values(draining)[("kimi_k3_ready",)] == 0


def test_phase() -> None:
    """One phase is 1, all others 0, and only finished ones have a duration."""
    seen = values(journal(supervisor(phases=phases(Phase.LOADING))))
    current = [key[1] for key, value in seen.items() if key[0] == "kimi_k3_phase" and value == 1]
    assert current == ["loading"]
    assert seen[("kimi_k3_phase_duration_seconds", "preflight")] == 60
    assert ("kimi_k3_phase_duration_seconds", "loading") not in seen
    assert seen[("kimi_k3_phase_started_timestamp_seconds", "loading")] == at(2).timestamp()


def test_repeated_phase_is_one_series() -> None:
    """Two series of one name and labels would void the whole scrape."""
    twice = tuple(PhaseChange(phase=Phase.LOADING, at=at(minute)) for minute in (1, 2, 3))
    assert values(journal(supervisor(phases=twice)))[
        ("kimi_k3_phase_started_timestamp_seconds", "loading")
    ] == (at(3).timestamp())


def test_lossless_has_no_conversion() -> None:
    """A relative error of 0 would claim a conversion that did not happen."""
    seen = values(lossless())
    assert seen[("kimi_k3_lossy",)] == 0
    assert not [key for key in seen if key[0].startswith("kimi_k3_conversion")]


def test_conversion() -> None:
    """Per layer and projection over ranks, and how many each rank has done."""
    seen = values(lossy())
    assert seen[("kimi_k3_lossy",)] == 1
    assert seen[("kimi_k3_conversion_projections", "1")] == 4
    assert seen[("kimi_k3_conversion_projections_expected", "1")] == 4
    assert seen[("kimi_k3_conversion_groups", "2", "w2")] == 20
    assert seen[("kimi_k3_conversion_relative_mse_ratio", "1", "w13")] == 0.01


def test_rank() -> None:
    """What a rank has measured, and nothing for what it has not."""
    one = rank(
        0,
        loading=Loading(bytes_done=5, bytes_total=None, shards_done=1, shards_total=4),
        memory=MemoryReading(kind="host", used_bytes=9),
    )
    seen = values(journal(supervisor(), one))
    assert seen[("kimi_k3_loading_bytes", "0")] == 5
    assert ("kimi_k3_loading_expected_bytes", "0") not in seen
    assert seen[("kimi_k3_memory_used_bytes", "0", "host")] == 9
    assert ("kimi_k3_memory_peak_bytes", "0", "host") not in seen


def test_zero_stands_where_it_is_known() -> None:
    """A rank that has not reported has converted nothing; an error of nothing is unknown."""
    seen = values(journal(lossy_supervisor(), lossy_rank(0, conversions=all_conversions()[:1])))
    assert seen[("kimi_k3_conversion_projections", "0")] == 1
    assert seen[("kimi_k3_conversion_projections", "1")] == 0
    assert seen[("kimi_k3_conversion_projections_expected", "1")] == 4
    assert seen[("kimi_k3_conversion_groups", "1", "w13")] == 10
    assert seen[("kimi_k3_conversion_groups", "2", "w2")] == 0
    assert ("kimi_k3_conversion_relative_mse_ratio", "2", "w2") not in seen
    assert ("kimi_k3_conversion_duration_seconds", "2", "w2") not in seen
    assert seen[("kimi_k3_conversion_model_relative_mse_ratio",)] == 0.01


def test_no_zero_where_a_record_is_not_trusted() -> None:
    """Its rank may have converted everything: nobody knows, and 0 would be a claim."""
    fault = Fault("rank-0001.json", "is empty")
    seen = values(journal(lossy_supervisor(), lossy_rank(0, conversions=()), faults=(fault,)))
    assert ("kimi_k3_conversion_projections", "1") not in seen
    assert ("kimi_k3_conversion_groups", "1", "w13") not in seen
    alone = journal(lossy_supervisor(ranks_report=False))
    assert ("kimi_k3_conversion_projections", "0") not in values(alone)
    assert ("kimi_k3_conversion_groups", "1", "w13") not in values(alone)


def test_no_label_grows_with_time() -> None:
    """Each start would otherwise leave its series behind for as long as Prometheus keeps them."""
    one = values(journal(supervisor()))
    other = values(journal(supervisor(start_id="another", started_at=at(1))))
    assert set(one) == set(other)
    assert one[("kimi_k3_start_timestamp_seconds",)] != other[("kimi_k3_start_timestamp_seconds",)]


def test_plan_and_stall() -> None:
    """Each part of the plan by its name; what the plan does not say is absent. A stall is 1 or 0."""
    seen = values(journal(supervisor(planned=PLANNED, kv_cache_bytes=7, stalled_since=NOW)))
    assert seen[("kimi_k3_memory_planned_bytes", "weights")] == 1
    assert seen[("kimi_k3_memory_planned_bytes", "limit")] == 4
    assert ("kimi_k3_memory_planned_bytes", "step") not in seen
    assert seen[("kimi_k3_kv_cache_bytes",)] == 7
    assert seen[("kimi_k3_engine_stalled",)] == 1
    plain = values(lossless())
    assert plain[("kimi_k3_engine_stalled",)] == 0
    assert ("kimi_k3_kv_cache_bytes",) not in plain


@pytest.mark.parametrize("last", [Phase.FAILED, Phase.STOPPED])
def test_what_has_ended_does_not_stall(last: Phase) -> None:
    """A hang that ended the start stays in its record; the alert would fire until the next one."""
    hung = supervisor(stalled_since=at(10), phases=phases(last))
    assert values(journal(hung))[("kimi_k3_engine_stalled",)] == 0


def test_warnings_by_code() -> None:
    """Every code has a series, so that an alert on it can be written before it first occurs."""
    seen = values(lossy(), health())
    assert seen[("kimi_k3_warnings", "lossy-weights", "warning")] == 1
    assert seen[("kimi_k3_warnings", "journal-fault", "warning")] == 0


def test_every_metric_occurs() -> None:
    """A metric that nothing ever sets would be an empty panel."""
    one = rank(
        0,
        loading=Loading(bytes_done=5, bytes_total=6, shards_done=1, shards_total=4),
        memory=MemoryReading(kind="host", used_bytes=9, peak_bytes=10, total_bytes=11),
        backend="AITER_INT4_BF16",
        proof=KernelProof(relative_error=0.004, relative_error_with_signs=0.004, signs_right=True),
    )
    seen = lossy()
    assert seen.supervisor is not None
    step = Step(phase=Phase.CAPTURING, name="graphs", since=at(16), done=5, total=10)
    counted = {key[0] for key in values(journal(supervisor(phases=phases(Phase.CAPTURING), step=step)))}
    changes = {
        "ending": Ending(at=at(10), exit_code=1, reason="no"),
        "planned": PLANNED,
        "start_timeout_seconds": 60.0,
        "kv_cache_bytes": 7,
    }
    ended = seen.supervisor.model_copy(update=changes)
    seen = replace(seen, supervisor=ended, ranks=(*seen.ranks[1:], one))
    observation = Observation(journal=seen, health=health(), machine=MACHINE, now=NOW)
    assert counted | {one.metric.name for one in samples(observation)} == {metric.name for metric in METRICS}


def test_an_acknowledged_warning() -> None:
    """Who has read what the conversion cost is not alerted again; that it costs something still stands."""
    seen = lossy()
    before = values(seen)
    assert before[("kimi_k3_warnings_unacknowledged", "lossy-weights", "warning")] == 1
    (matter,) = [one for one in matters(seen, None, NOW) if one.advice.code == "lossy-weights"]
    given = Acknowledgements().with_one(matter.advice.id, matter.about, by="Ada", note=None, at=NOW)
    observation = Observation(seen, None, NOTHING, NOW, given)
    after = {(one.metric.name, *one.labels): one.value for one in samples(observation)}
    assert after[("kimi_k3_warnings_unacknowledged", "lossy-weights", "warning")] == 0
    assert after[("kimi_k3_warnings", "lossy-weights", "warning")] == 1
    assert values(lossless())[("kimi_k3_warnings_unacknowledged", "lossy-weights", "warning")] == 0


def test_what_cannot_be_acknowledged_is_not_unacknowledged() -> None:
    """Else an alert about it would never end."""
    seen = values(lossless(), health(EngineOutcome.TIMEOUT))
    assert ("kimi_k3_warnings", "engine-unhealthy", "critical") in seen
    assert ("kimi_k3_warnings_unacknowledged", "engine-unhealthy", "critical") not in seen


def test_the_budget_of_the_start() -> None:
    """An alert holds a start against its own budget; of an older record nobody knows it, and another node
    counts from when it joined."""
    assert values(journal(supervisor(start_timeout_seconds=60)))[("kimi_k3_start_budget_seconds",)] == 60
    assert ("kimi_k3_start_budget_seconds",) not in values(lossless())
    other = supervisor(start_timeout_seconds=60, node=1, nodes=2, engine_url=None)
    assert ("kimi_k3_start_budget_seconds",) not in values(journal(other))


@pytest.mark.parametrize("rule", ScaleRule)
def test_the_limit_of_the_loss(rule: ScaleRule) -> None:
    """It is that of the rule that was asked for; nothing is lost where nothing is converted."""
    how = Requantisation(rule=rule, negative_scale=False, allow_nonfinite=False)
    seen = values(journal(lossy_supervisor(requantisation=how), lossy_rank(0, requantisation=how)))
    assert seen[("kimi_k3_conversion_limit_relative_mse_ratio",)] == rule.limit_relative_mse
    assert ("kimi_k3_conversion_limit_relative_mse_ratio",) not in values(lossless())


def test_the_limit_lies_above_what_was_measured() -> None:
    """Heavy tails, and a quarter more without negative scales, stay below; `amax` is above that of `mse`."""
    assert 1.25 * 0.0048 < 0.0084 < ScaleRule.MSE.limit_relative_mse < 0.0103
    assert ScaleRule.AMAX.limit_relative_mse > 0.0171
