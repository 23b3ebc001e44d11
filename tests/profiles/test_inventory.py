# SPDX-License-Identifier: Apache-2.0
"""Every flag and variable of a profile exists in the vLLM that is served with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.plan.launch import build_launch
from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.profiles.rules import REFUSED_VARIABLES
from tests.plan.test_launch import launched

NAMES_0_33 = json.loads((Path(__file__).parent / "data" / "vllm-0.33.0.json").read_text(encoding="utf-8"))
"""All flags of ``vllm serve`` and all variables of ``vllm.envs`` in 0.33.0, as its own code lists them."""

LIST = """
import json
import vllm.envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
options = make_arg_parser(FlexibleArgumentParser())._option_string_actions
print(json.dumps({"flags": sorted(options), "variables": sorted(vllm.envs.environment_variables)}))
"""


def unknown(names: dict[str, Any]) -> Iterator[str]:
    """What profiles and the plan say that a vLLM does not know."""
    for name in profile_names():
        launch = build_launch(launched(load_profile(name)), cores={0, 1}, engine_command=())
        for word in launch.argv:
            flag = word.partition(".")[0]
            if word.startswith("--") and flag not in names["flags"]:
                yield f"{name}: {word}"
        for variable in launch.environment:
            if variable.startswith("VLLM_") and variable not in names["variables"]:
                yield f"{name}: {variable}"


def test_vllm_0_33_knows_every_name() -> None:
    """0.33 removed a dozen names that 0.32 still had, and ignores a variable that it does not know."""
    assert list(unknown(NAMES_0_33)) == []


def test_what_is_refused_as_removed_is_gone() -> None:
    """A refusal with a wrong reason would keep somebody from something useful."""
    removed = [name for name, why in REFUSED_VARIABLES.items() if "no longer reads" in why]
    assert removed
    assert not set(removed) & set(NAMES_0_33["variables"])


@pytest.mark.engine
def test_the_installed_vllm_knows_every_name() -> None:
    """The list above is 0.33's; the engine that the tests run is another one."""
    pytest.importorskip("vllm.version", reason="vLLM is not installed")
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(unknown(json.loads(done.stdout.splitlines()[-1]))) == []
