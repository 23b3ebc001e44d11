# SPDX-License-Identifier: Apache-2.0
"""Every instruction of the ROCm image's Dockerfile, on a base without ROCm.

The base has the Python source of vLLM 0.33.0's wheel, a double of AITER and FlyDSL (tests/kernels/double) and
a torch that is only a name. So the build is real, and what the kernels would do is not shown.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

import pytest

import kimi_k3
from tests.docker.engine import NOTHING, Docker
from tests.docker.test_images import inside, inspected
from tests.kernels.doubles import Generation, install, k3_rows
from tests.preflight.node import AITER_KERNELS
from tests.wheels import vllm_source

VLLM, TORCH = "0.33.0", "2.12.0+git6bbd2"
IMAGE = f"kimi-k3-gfx942:{kimi_k3.__version__}"
GFX942 = {
    "KIMI_K3_HARDWARE": "mi325x",
    "KIMI_K3_MODEL_DIR": "/models",
    "KIMI_K3_API_KEY_FILE": "/etc/hostname",
    "KIMI_K3_RENDER_GID": "993",
    "KIMI_K3_VIDEO_GID": "44",
}
SILU = "def flydsl_a16w4_gemm1(*, a_bf16):\n    pass\n"
ACTIVATION = "def flydsl_a16w4_gemm1(*, a_bf16, act='silu'):\n    pass\n"

Base = Callable[..., str]


@pytest.fixture(scope="module")
def base(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Makes a base image; by default one that can serve int4 on gfx942."""

    def make(name: str, *, vllm: bool = True, kernels: str = ACTIVATION) -> str:
        context = tmp_path_factory.mktemp(name)
        site = context / "site"
        site.mkdir()
        if vllm:
            shutil.copytree(vllm_source(VLLM).parent, site, dirs_exist_ok=True)
        install(site, Generation.THIRD).ship(row for row in k3_rows() if len(row) == 28)
        (site / AITER_KERNELS / "moe_2stage_a16wmix").mkdir(parents=True)
        (site / AITER_KERNELS / "moe_2stage_a16wmix" / "__init__.py").write_text(kernels)
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text(f"__version__ = {TORCH!r}\n")
        (site / f"torch-{TORCH}.dist-info").mkdir()
        (site / f"torch-{TORCH}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH}\n"
        )
        (context / "Dockerfile").write_text(
            f"FROM {docker.variables['PYTHON_IMAGE']}\n"
            "COPY site /tmp/site\n"
            "RUN python3 -c 'import shutil, sysconfig; "
            'shutil.copytree("/tmp/site", sysconfig.get_path("purelib"), dirs_exist_ok=True)\'\n'
        )
        docker.run("build", "--tag", f"{name}:base", context)
        return f"{name}:base"

    return make


def build(docker: Docker, base: str, *, check: bool = True, given: Mapping[str, str] = NOTHING) -> str:
    """Build the image on a base; what it printed."""
    return docker.compose(
        "--profile", "mi325x", "build", "engine", check=check, given={**GFX942, "ROCM_IMAGE": base, **given}
    )


def test_image(docker: Docker, base: Base) -> None:
    """Stock vLLM as it was, our package beside it, kernels compiled ahead; not root, with an inventory."""
    log = build(docker, base("good"), given={"KERNELS": "ahead", "KERNELS_PROFILE": "tp8"})
    assert "packages are as they were" in log
    found = inspected(docker, IMAGE)["Config"]
    assert found["User"] == "10001:0"
    assert found["Labels"]["org.opencontainers.image.base.name"] == "good:base"
    assert found["Healthcheck"]["Test"] == ["CMD", "kimi-k3", "healthcheck"]
    told = inside(docker, IMAGE, "cat", "/opt/kimi-k3/versions.txt").split()
    assert {f"vllm=={VLLM}", f"torch=={TORCH}", f"kimi-k3-gfx942=={kimi_k3.__version__}"} <= set(told)
    bill = json.loads(inside(docker, IMAGE, "cat", "/opt/kimi-k3/sbom.cdx.json"))
    assert sorted(f"{one['name']}=={one['version']}" for one in bill["components"]) == sorted(told)
    # The base's torch is only a name, which vLLM cannot import.
    where = "from importlib.util import find_spec; print(find_spec('torch').origin, find_spec('vllm').origin)"
    seen = inside(docker, IMAGE, "python", "-c", where)
    assert "/torch/" in seen
    assert "/vllm/" in seen
    assert "/opt/kimi-k3" not in seen
    kernels = inside(
        docker,
        IMAGE,
        "kimi-k3",
        "kernels",
        "check",
        "--profile",
        "tp8",
        "--json",
        "--cache-dir",
        "/opt/kimi-k3/kernels",
    )
    assert {kernel["state"] for kernel in json.loads(kernels)["kernels"]} == {"present"}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("without-vllm", {"vllm": False}, "has no vllm"),
        ("silu", {"kernels": SILU}, "aiter-activation"),
    ],
)
def test_a_base_that_cannot_serve(
    docker: Docker, base: Base, name: str, given: dict[str, object], said: str
) -> None:
    """The build ends, and its last words are the reason."""
    log = build(docker, base(name, **given), check=False)
    assert "failed to solve" in log
    assert said in log


def test_kernels_ahead_or_later(docker: Docker, base: Base) -> None:
    """Another word is refused as what it is, not as an image that cannot be pulled."""
    log = build(docker, base("kernels"), check=False, given={"KERNELS": "yes"})
    assert "KERNELS=yes (docker/versions.env): it must be ahead or later" in log


def test_aiter_is_replaced_where_it_must_be(docker: Docker, base: Base) -> None:
    """An AITER with another activation gives way to the wheel that was named; a good one does not."""
    wheel = "amd_aiter-0.1.30-py3-none-any.whl"
    place = docker.checkout / "docker" / "build" / "wheels" / wheel
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr(f"{AITER_KERNELS}/moe_2stage_a16wmix/__init__.py", ACTIVATION)
        for part in PurePosixPath(AITER_KERNELS).parents:
            archive.writestr(f"{part}/__init__.py", "") if part.name else None
        info = "amd_aiter-0.1.30.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.1.30\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    try:
        given = {"AITER_REPLACEMENT": f"/docker/wheels/{wheel}"}
        log = build(docker, base("old", kernels=SILU), given=given)
        assert "aiter: replaced by" in log
        assert "amd-aiter==0.1.30" in inside(docker, IMAGE, "cat", "/opt/kimi-k3/versions.txt").split()
        assert "is not needed" in build(docker, base("new"), given=given)
    finally:
        place.unlink()
