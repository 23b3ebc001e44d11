# SPDX-License-Identifier: Apache-2.0
"""Which of a deployment's nodes a start is, and how it finds the first one. Pure.

vLLM's own multi-node executor: every node runs the same command with its rank, all but the first without an
API (``--headless``). vLLM numbers the ranks node by node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.profiles.schema import Profile
from kimi_k3.words.addresses import MASTER_PORT
from kimi_k3.words.given import require_text

FIRST_NODE = "FIRST_NODE"
"""What stands for the first node's address in a plan."""


@dataclass(frozen=True)
class Place:
    """Which node this is.

    Attributes:
        node: counted from 0; the first one serves the API.
        nodes: how many there are.
        leader: host name or address of the first one, as every node reaches it.
        port: there, at which the ranks of all nodes find each other.
    """

    node: int
    nodes: int
    leader: str
    port: int = MASTER_PORT

    @property
    def headless(self) -> bool:
        """Whether it computes for the first one and answers nobody itself."""
        return self.node > 0


def place(profile: Profile, node: int | None, leader: str | None, port: int | None = None) -> Place | None:
    """The place that an operator gave a start; ``None`` where the profile has one node.

    Args:
        profile: that is started.
        node: of ``--node-rank``; ``None`` is the first.
        leader: of ``--leader-address``; ``None`` leaves it open, as a plan does.
        port: of ``--leader-port``; ``None`` for vLLM's own default.

    Raises:
        OperatorError: the profile has no such node, or the address or port is none.
    """
    if profile.nodes == 1:
        for flag, given in (("--node-rank", node), ("--leader-address", leader), ("--leader-port", port)):
            if given is not None:
                raise _usage(
                    f"{flag} {given}: profile {profile.name} is for one node",
                    "leave it out, or take a profile for several, as pp2-tp8",
                )
        return None
    if node is not None and not 0 <= node < profile.nodes:
        raise _usage(
            f"--node-rank {node}: profile {profile.name} has {profile.nodes} nodes",
            f"give 0 to {profile.nodes - 1}; 0 is the one that serves the API",
        )
    if leader is not None and not _is_host(leader):
        raise _usage(
            f"--leader-address {leader!r}: is no host name or address",
            "give that of the first node alone, without a scheme or a port",
        )
    if port is not None and not 0 < port < 65536:
        raise _usage(f"--leader-port {port}: is no port", "give one from 1 to 65535, the same on all nodes")
    return Place(
        node=node or 0,
        nodes=profile.nodes,
        leader=FIRST_NODE if leader is None else require_text("--leader-address", leader),
        port=MASTER_PORT if port is None else port,
    )


def _is_host(text: str) -> bool:
    """Whether a text is a host's name or address, and nothing beside it."""
    try:
        return bool(ip_address(text))
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?", text) is not None


def require_place(profile: Profile, node: int | None, leader: str | None) -> None:
    """Of several nodes, a start must know which it is.

    Raises:
        OperatorError: it does not.
    """
    if profile.nodes == 1:
        return
    for flag, given, hint in (
        ("--node-rank", node, f"0 to {profile.nodes - 1} (of a LeaderWorkerSet: $LWS_WORKER_INDEX)"),
        ("--leader-address", leader, "the first node's name or address ($LWS_LEADER_ADDRESS)"),
    ):
        if given is None:
            raise _usage(
                f"{flag} is missing: profile {profile.name} has {profile.nodes} nodes", f"give {hint}"
            )


def _usage(what: str, remedy: str) -> OperatorError:
    return OperatorError(what, remedy=remedy, exit_code=ExitCode.USAGE)
