# SPDX-License-Identifier: Apache-2.0
"""A policy checker finds nothing but what there is a reason for."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from functools import cache
from pathlib import Path

import pytest

from tests.helm.cases import CASES, GATEWAYS
from tests.helm.rendering import MONITORING, template
from tests.surroundings import SURROUNDINGS

LOCK = Path(__file__).with_name("checkov.lock")
PINNED = "the operator's choice: image.*.digest, which the documentation asks for; `everything` has one"
ACCEPTED = {
    "CKV_K8S_11": "a CPU limit would throttle the ranks in the middle of a step; requests hold the cores",
    "CKV_K8S_15": "Always asks a registry at every restart, which an air-gapped node does not have",
    "CKV_K8S_40": "of the case `openshift`, where the cluster gives the user",
    "CKV_K8S_43": PINNED,
    "CKV_K8S_8": "of the tests' pods, which end by themselves",
    "CKV_K8S_9": "of the tests' pods, to which nobody connects",
}
"""What checkov finds and why it stays."""

OF_TESTS_ALONE = {"CKV_K8S_8", "CKV_K8S_9"}
TESTS = ("-test", "-verify")


@cache
def checkov() -> Path:
    """The checker, in an environment of its own: it pins half of the index."""
    kept = Path(sys.prefix) / "checkov"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=sys.prefix) as scratch:
            made = Path(scratch) / "checkov"
            venv.create(made, with_pip=True)
            pip = [str(made / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
            subprocess.run([*pip, "install", "--no-deps", "--requirement", LOCK], check=True)
            made.rename(kept)
    return kept


def findings(directory: Path) -> list[tuple[str, str, str]]:
    """Check, name of the object, and what it says, for whatever does not pass."""
    done = subprocess.run(
        [
            *(checkov() / "bin" / "python", "-m", "checkov.main", "--framework", "kubernetes"),
            *("--directory", directory, "--output", "json", "--quiet", "--skip-download"),
        ],
        env={**SURROUNDINGS, "CHECKOV_RUN_SCA_PACKAGE_SCAN_V2": "false"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip(), done.stderr
    found = json.loads(done.stdout)
    if "results" not in found:
        # Nothing at all was read.
        assert found["passed"] > 0, found
        return []
    assert found["summary"]["parsing_errors"] == 0
    return [
        (one["check_id"], one["resource"], one["check_name"]) for one in found["results"]["failed_checks"]
    ]


def test_every_case(tmp_path: Path) -> None:
    """Of what is found each has its reason, and each reason is still needed."""
    for case, values in CASES.items():
        (tmp_path / f"{case}.yaml").write_text(template(values, apis=(*MONITORING, *GATEWAYS)))
    found = findings(tmp_path)
    assert [one for one in found if one[0] not in ACCEPTED] == []
    assert {one[0] for one in found} == set(ACCEPTED)
    assert [one[1] for one in found if one[0] in OF_TESTS_ALONE if not one[1].endswith(TESTS)] == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
        ("allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true"),
        ("automountServiceAccountToken: false", "automountServiceAccountToken: true"),
    ],
)
def test_the_checker_sees(tmp_path: Path, right: str, wrong: str) -> None:
    """A pod that is less confined is found: the test above can fail."""
    text = template(CASES["ep8"])
    assert right in text
    (tmp_path / "pod.yaml").write_text(text.replace(right, wrong))
    assert {one[0] for one in findings(tmp_path)} - set(ACCEPTED)
