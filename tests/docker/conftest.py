# SPDX-License-Identifier: Apache-2.0
"""One engine and one set of images for all tests here: minutes, of which most are pip's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docker.engine import (
    MINUTES,
    CannotRun,
    Docker,
    base_image,
    prometheus_image,
    running_engine,
    why_not,
)
from tests.docker.pins import PINS


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """An engine with the base images; without one these tests are skipped, but not where CI runs."""
    if (why := why_not()) is not None:
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    directory = tmp_path_factory.mktemp("docker")
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(running_engine(directory))
        except CannotRun as error:
            pytest.skip(str(error))
        images = {"PYTHON_IMAGE": base_image(engine, PINS["PYTHON_IMAGE"], directory)}
        images["PROMETHEUS_IMAGE"] = prometheus_image(engine, PINS["PROMETHEUS_IMAGE"], directory)
        yield replace(engine, variables={**engine.variables, **images})


@pytest.fixture(scope="session")
def images(docker: Docker) -> Docker:
    """The engine, with the sidecar's image and that for CPUs; what building them printed is kept."""
    log = docker.compose("--profile", "cpu", "build", timeout=30 * MINUTES)
    (docker.checkout.parent / "build.log").write_text(log)
    return docker


@pytest.fixture
def build_log(images: Docker) -> Path:
    """What building the images printed."""
    return images.checkout.parent / "build.log"
