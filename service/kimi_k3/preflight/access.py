# SPDX-License-Identifier: Apache-2.0
"""May this process open the GPUs' device files?"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

from kimi_k3.preflight.finding import Finding, failed, passed
from kimi_k3.preflight.kfd import Gpus
from kimi_k3.preflight.machine import Machine

CHECK = "gpu-access"
KFD = "/dev/kfd"
RENDER = "/dev/dri/renderD{}"
UNMAPPED_GID = 65534
"""What the kernel shows for a group that a user namespace does not map (/proc/sys/kernel/overflowgid)."""


def check_access(machine: Machine, gpus: Gpus) -> Finding:
    """``/dev/kfd`` and each GPU's render device can be opened for reading and writing."""
    devices = [KFD, *(RENDER.format(gpu.render_minor) for gpu in gpus.usable if gpu.render_minor is not None)]
    denied = list(_denied(machine, devices))
    if not denied:
        return passed(CHECK, f"{KFD} and {len(devices) - 1} render devices can be opened")
    device, error = denied[0]
    more = f" (and {len(denied) - 1} more)" if len(denied) > 1 else ""
    if error.errno == errno.ENOENT:
        return failed(
            CHECK,
            f"{device}{more} is not there",
            f"docker and podman: --device {KFD} --device /dev/dri; Kubernetes: ask for amd.com/gpu",
        )
    if error.errno == errno.EACCES:
        return _permission(machine, device, more)
    if error.errno == errno.EPERM:
        return failed(
            CHECK,
            f"{device}{more}: {error.strerror}: the container's device cgroup forbids it",
            f"docker and podman: --device {device} instead of a volume; Kubernetes: ask for amd.com/gpu",
        )
    return failed(
        CHECK,
        f"{device}{more} cannot be opened: {error.strerror or error}",
        "look for amdgpu in the host's dmesg; a GPU that was lost needs a reset or a reboot",
    )


def _denied(machine: Machine, devices: list[str]) -> Iterator[tuple[str, OSError]]:
    for device in devices:
        try:
            machine.opens(machine.path(device))
        except OSError as error:
            yield device, error


def _permission(machine: Machine, device: str, more: str) -> Finding:
    ours = ", ".join(map(str, sorted(machine.groups)))
    try:
        found = Path(machine.path(device)).stat()
    except OSError:
        owner, gid = "its group cannot be read", None
    else:
        owner, gid = f"it is of group {found.st_gid} with mode {found.st_mode & 0o7777:04o}", found.st_gid
    what = f"{device}{more}: permission denied: {owner}, this process is user {machine.uid} of groups {ours}"
    if gid == UNMAPPED_GID:
        return failed(
            CHECK,
            f"{what}; {gid} stands for every group that this user namespace does not have",
            "podman: --group-add keep-groups with the runtime crun, and the user in the device's group on "
            "the host; or start the container as root",
        )
    if gid is None or gid in machine.groups:
        return failed(
            CHECK, what, "on the host: chmod 0660 with a group of this process, or 0666 as udev can set"
        )
    return failed(
        CHECK,
        what,
        f'docker: --group-add {gid}; podman: --group-add keep-groups; compose: group_add: ["{gid}"]; '
        f"Kubernetes: securityContext.supplementalGroups: [{gid}] of the pod; on the host itself: "
        f"usermod -aG {gid} USER",
    )
