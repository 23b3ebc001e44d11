# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from datetime import timedelta

from kimi_k3.sidecar.conversion import conversion_view, served_lossy
from kimi_k3.words.weights import Projection, Weights

from .builders import (
    all_conversions,
    at,
    conversion,
    journal,
    lossless,
    lossy,
    lossy_rank,
    lossy_supervisor,
    rank,
    supervisor,
)


def test_lossless() -> None:
    """Served as in the checkpoint: said in a sentence, with nothing that looks like a loss of 0."""
    view = conversion_view(lossless())
    assert (view.lossless, view.total, view.progress, view.layers) == (True, None, None, [])
    assert "exactly" in view.note


def test_unknown() -> None:
    """Without a supervisor nobody can say whether the weights are lossless."""
    view = conversion_view(journal(None))
    assert (view.weights, view.lossless, view.total) == (None, None, None)


def test_merge_over_ranks() -> None:
    """Ranks hold different experts of a layer: errors and energies add up, extremes are kept."""
    one = conversion(1, Projection.W13, groups=10, squared_error=1.0, energy=10.0, max_error=0.1)
    two = conversion(
        1,
        Projection.W13,
        groups=30,
        lossless_groups=6,
        squared_error=5.0,
        energy=110.0,
        max_error=0.7,
        started_at=at(3),
        ended_at=at(5),
    )
    seen = journal(lossy_supervisor(), lossy_rank(0, conversions=(one,)), lossy_rank(1, conversions=(two,)))
    [layer] = conversion_view(seen).layers
    assert (layer.groups, layer.lossless_groups, layer.lossless_ratio) == (40, 10, 0.25)
    assert (layer.relative_mse, layer.max_error) == (6.0 / 120.0, 0.7)
    assert (layer.started_at, layer.ended_at, layer.seconds) == (at(3), at(5), 120.0)
    assert [detail.rank for detail in layer.ranks] == [0, 1]
    assert layer.ranks[1].relative_mse == 5.0 / 110.0


def test_totals() -> None:
    """Over everything: the sum of squared errors over the sum of squares, not a mean of ratios."""
    late = conversion(
        2, Projection.W2, ended_at=at(4) + timedelta(seconds=9), squared_error=0.0, energy=900.0
    )
    seen = journal(lossy_supervisor(world_size=1), lossy_rank(0, conversions=(*all_conversions()[:3], late)))
    total = conversion_view(seen).total
    assert total is not None
    assert (total.groups, total.bytes_read, total.bytes_written) == (40, 400, 440)
    assert (total.relative_mse, total.seconds) == (3.0 / 1200.0, 9.0)


def test_nothing_converted_yet() -> None:
    """Before the first report every sum is unknown, while done and expected are known."""
    view = conversion_view(journal(lossy_supervisor()))
    assert view.total is not None
    assert set(view.total.model_dump().values()) == {None}
    assert view.progress is not None
    assert (view.progress.done, view.progress.expected, view.progress.fraction) == (0, 8, 0.0)
    assert len(view.missing) == 4


def test_missing_names_the_ranks() -> None:
    """An operator must see which worker is behind, by layer and projection."""
    seen = journal(lossy_supervisor(), lossy_rank(0), lossy_rank(1, conversions=all_conversions()[:3]))
    view = conversion_view(seen)
    [missing] = view.missing
    assert (missing.layer, missing.projection, missing.ranks) == (2, Projection.W2, [1])
    assert view.layers[-1].missing_ranks == [1]
    assert view.progress is not None
    assert (view.progress.done, view.progress.expected) == (7, 8)


def test_repeated_conversion_counts_once() -> None:
    """A layer that was converted again replaces its first report instead of doubling the sums."""
    again = conversion(1, Projection.W13, groups=20)
    seen = journal(lossy_supervisor(), lossy_rank(0, conversions=(conversion(1, Projection.W13), again)))
    [layer] = conversion_view(seen).layers
    assert layer.groups == 20


def test_zero_weights_have_no_relative_error() -> None:
    """0 / 0 is unknown."""
    zero = conversion(1, Projection.W13, squared_error=0.0, energy=0.0, groups=0, lossless_groups=0)
    seen = journal(lossy_supervisor(), lossy_rank(0, conversions=(zero,)))
    [layer] = conversion_view(seen).layers
    assert (layer.relative_mse, layer.lossless_ratio) == (None, None)


def test_one_lossy_rank_makes_it_lossy() -> None:
    """A rank that serves int4 against the supervisor's word must not be called lossless."""
    seen = journal(supervisor(), rank(0), rank(1, weights=Weights.INT4, conversions=all_conversions()))
    assert served_lossy(seen) is True
    view = conversion_view(seen)
    assert view.lossless is False
    assert len(view.layers) == 4


def test_complete() -> None:
    """Nothing is missing when every rank has reported every projection."""
    view = conversion_view(lossy())
    assert view.missing == []
    assert view.progress is not None
    assert view.progress.fraction == 1.0
