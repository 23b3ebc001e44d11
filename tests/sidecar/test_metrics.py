# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import pytest

from kimi_k3.sidecar.metrics import METRICS, Metric


def test_names_are_unique() -> None:
    """Two metrics of one name would be one metric with two meanings."""
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 30


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_naming(metric: Metric) -> None:
    """Own prefix, base units, and the suffix that belongs to the type and to no other."""
    assert re.fullmatch(r"kimi_k3_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") is (metric.kind == "counter")
    assert metric.name.endswith("_info") is (metric.kind == "info")
    assert not re.search(r"_(bucket|count|sum|created|ms|mb|gb|percent)$", metric.name)
    # The unit comes last, after what is expected, used or measured.
    assert not re.search(r"_(bytes|seconds|ratio)_", metric.name)
    assert (metric.labels == (metric.name,)) is (metric.kind == "stateset")
    assert metric.help.endswith(".")
    assert "\n" not in metric.help
    assert len(set(metric.labels)) == len(metric.labels)
    assert not {"le", "quantile", "job", "instance", "start_id", "pid"} & set(metric.labels)
