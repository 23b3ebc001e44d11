# SPDX-License-Identifier: Apache-2.0
"""What the inherited environment does to a start."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from kimi_k3.plan.launch import overridden
from kimi_k3.preflight.finding import Finding, failed, passed, warned
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.subject import Subject
from kimi_k3.preflight.vllm_source import variables_of
from kimi_k3.profiles import rules
from kimi_k3.profiles.schema import Architecture
from kimi_k3.words.environment import is_service_link

CONFLICT, LEFTOVER, REPLACED, LINK = (
    "environment-conflict",
    "environment-without-effect",
    "environment-replaced",
    "environment-service-link",
)
_URL = re.compile(r"(tcp|udp|sctp)://")
VLLM = "VLLM_"
_NUMBERS = ("VLLM_PORT", "VLLM_DP_MASTER_PORT")
"""Variables that Kubernetes makes of a Service called ``vllm`` or ``vllm-dp-master``."""


def check_environment(machine: Machine, subject: Subject) -> Iterator[Finding]:
    """Conflicts, what vLLM does not read, what the start replaces; one pass if there is nothing."""
    inherited = machine.environment
    found = [
        *_service_links(inherited),
        *(_conflicts(subject, inherited) if subject.on_gpus else ()),
        *_cut(subject, inherited),
        *_refused(subject, inherited),
        *_unknown(machine, subject),
        *(
            warned(REPLACED, line, "unset it, so that nobody takes it for what is served with")
            for line in overridden(subject.launch, inherited)
        ),
    ]
    yield from found or [passed(CONFLICT, f"nothing in {len(inherited)} variables contradicts the start")]


def _service_links(inherited: Mapping[str, str]) -> Iterator[Finding]:
    for name in _NUMBERS:
        value = inherited.get(name, "")
        if _URL.match(value):
            yield failed(
                LINK,
                f"environment variable {name}={value!r}: Kubernetes made it of a Service, and vLLM takes it "
                "for its port and ends",
                "in the pod: enableServiceLinks: false, or give the Service another name; here: unset it",
            )


def _conflicts(subject: Subject, inherited: Mapping[str, str]) -> Iterator[Finding]:
    """Halves of pairs, and what the rules of profiles say of the environment that vLLM will have."""
    first, second = rules.SITUV2_PAIR
    values = inherited.get(first) or "0", inherited.get(second) or "0"
    if values[0] != values[1]:
        yield failed(
            CONFLICT,
            f"environment variables {first}={values[0]} and {second}={values[1]} contradict each other: "
            "gate and up are then taken for each other, and answers are garbage (vllm-project/recipes#859)",
            f"unset both; the profile sets {rules.SITUV2}, from which vLLM makes both",
        )
    variables = subject.variables(inherited)
    profile = subject.profile
    if profile.gpu is not None and profile.gpu.architecture is Architecture.GFX942:
        for reason in rules.unfit_for_gfx942(subject.flags, variables, subject.deployment.weights):
            yield failed(CONFLICT, f"with the inherited environment: {reason}", "unset what is set otherwise")


def _cut(subject: Subject, inherited: Mapping[str, str]) -> Iterator[Finding]:
    """Where the layers are cut into stages: plan and acceptance count on vLLM's own way."""
    name = rules.LAYER_PARTITION
    if inherited.get(name) and subject.profile.pipeline_parallel_size > 1:
        yield failed(
            CONFLICT,
            f"environment variable {name}={inherited[name]!r} cuts the layers otherwise than the plan",
            "unset it",
        )


def _unknown(machine: Machine, subject: Subject) -> Iterator[Finding]:
    """Variables with vLLM's prefix that the installed one does not read; none if it cannot be asked."""
    told = {*subject.launch.environment, *rules.REFUSED_VARIABLES, *rules.PLANNED_VARIABLES}
    names = [
        name
        for name, value in sorted(machine.environment.items())
        if name.startswith(VLLM) and value and name not in told and not is_service_link(VLLM, name, value)
    ]
    if not names or (package := machine.package("vllm")) is None:
        return
    known = {name.removeprefix(VLLM) for name in variables_of(package) if name.startswith(VLLM)}
    for name in names:
        if known and name.removeprefix(VLLM) not in known:
            close = get_close_matches(name.removeprefix(VLLM), known, n=1)
            # Not its value: nobody knows what stands in it.
            yield warned(
                LEFTOVER,
                f"environment variable {name}: the installed vLLM does not know it",
                f"did you mean {VLLM + close[0]}?" if close else "unset it",
            )


def _refused(subject: Subject, inherited: Mapping[str, str]) -> Iterator[Finding]:
    for name, why in rules.REFUSED_VARIABLES.items():
        if inherited.get(name) and name not in rules.OF_ONE_START:
            yield warned(LEFTOVER, f"environment variable {name}={inherited[name]!r}: {why}", "unset it")
    replaced = {*subject.launch.environment, "VLLM_PLUGINS", "VLLM_API_KEY"}
    for name in sorted(rules.PLANNED_VARIABLES - replaced):
        value = inherited.get(name)
        if value and not _URL.match(value):
            yield warned(
                LEFTOVER,
                f"environment variable {name}={value!r}: the start decides this itself",
                "unset it, unless you know that this start needs it",
            )
