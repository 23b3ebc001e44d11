# SPDX-License-Identifier: Apache-2.0
"""The kind of device that the profile is for."""

from __future__ import annotations

from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.profiles.schema import Device, Profile

KFD = Path("/dev/kfd")
"""The device file by which every ROCm process reaches its GPUs."""


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
