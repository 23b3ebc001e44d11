# SPDX-License-Identifier: Apache-2.0
"""The kind of device that the profile is for."""

from __future__ import annotations

from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.profiles.schema import Device, Profile

KFD = Path("/dev/kfd")
"""The device file by which every ROCm process reaches its GPUs."""


def usual_profile(*, image: bool = False, kfd: Path = KFD) -> str:
    """The profile of a start on this machine if none is named: for GPUs where there are any, else the toy.

    Args:
        image: for an image; what machine it is made on says nothing of where it will run.
    """
    return "ep8" if image or kfd.exists() else "cpu-tiny"


def check_device(profile: Profile, *, kfd: Path = KFD) -> None:
    """A machine, or a container, in which AMD's GPUs can be seen, for a profile that runs on them.

    Raises:
        OperatorError: there are none.
    """
    if profile.device is Device.ROCM and not kfd.exists():
        raise OperatorError(
            f"--profile {profile.name}: runs on AMD GPUs, and there is no {kfd} here",
            remedy=f"pass {kfd} and /dev/dri into the container, load the amdgpu driver, or take "
            "--profile cpu-tiny",
            exit_code=ExitCode.FAILED,
        )
