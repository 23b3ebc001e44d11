# SPDX-License-Identifier: Apache-2.0
"""Which file system a directory is on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = "/proc/self/mountinfo"

NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs"}
    | {"panfs", "smb3", "smbfs", "wekafs"}
)
"""File systems whose files come over a network."""

LOCAL_FUSE = frozenset(
    {"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.overlayfs", "fuse.portal", "fuse.snapfuse"}
)
"""File systems in user space (``fuse.*``) that are not on a network; the others are taken for such."""

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One mounted file system."""

    point: str
    kind: str
    options: tuple[str, ...]

    @property
    def network(self) -> bool:
        """Whether its files come over a network."""
        return self.kind in NETWORK or (self.kind.startswith("fuse.") and self.kind not in LOCAL_FUSE)


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """The mounts, in their order; lines of another form are passed over."""
    found = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")[0]
        if separator and len(fields) >= 6 and kind:
            point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
            found.append(Mount(point, kind, tuple(fields[5].split(","))))
    return tuple(found)


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that ``path``, absolute and without links, is on; of several at one place the last."""
    best = None
    for mount in mounts:
        below = mount.point.rstrip("/") + "/"
        if f"{str(path).rstrip('/')}/".startswith(below) and (
            best is None or len(mount.point) >= len(best.point)
        ):
            best = mount
    return best
