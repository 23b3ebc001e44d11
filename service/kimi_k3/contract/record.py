# SPDX-License-Identifier: Apache-2.0
"""What the source of each supported version was when the plugin was written against it."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Numbers = tuple[int, int, int]


class Definition(BaseModel):
    """One definition, as it was.

    Attributes:
        parameters: names that the function takes, in order; ``None`` if it is no function.
        sha256: of its lines (:func:`kimi_k3.contract.source.digest`); ``None`` for a class and for what is
            imported from another module.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    parameters: tuple[str, ...] | None = None
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] | None = None


class Contract(BaseModel):
    """One version of vLLM.

    Attributes:
        version: of vLLM's release.
        files: definitions by name, by file below the package's directory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]
    files: dict[str, dict[str, Definition]] = Field(min_length=1)

    @property
    def numbers(self) -> Numbers:
        """For comparisons."""
        found = release(self.version)
        assert found is not None
        return found

    def definition(self, file: str, name: str) -> Definition | None:
        """What is recorded of a name; ``None`` if nothing is."""
        return self.files.get(file, {}).get(name)


@cache
def contracts() -> tuple[Contract, ...]:
    """All recorded versions, oldest first. The files travel inside the package."""
    directory = resources.files("kimi_k3.contract") / "data"
    found = [
        Contract.model_validate_json(file.read_bytes())
        for file in directory.iterdir()
        if file.name.endswith(".json")
    ]
    return tuple(sorted(found, key=lambda contract: contract.numbers))


def supported(word: str = "and") -> str:
    """The recorded versions, in an operator's words: "0.32.0 and 0.33.0"."""
    return f" {word} ".join(contract.version for contract in contracts())


def release(version: str) -> Numbers | None:
    """The numbers of a version, ``None`` if it has none; a build's suffix (``+rocm722``) does not count."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?!\d)", version)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))


def is_release(version: str) -> bool:
    """Whether a version is a release and nothing before or after it; a build's suffix does not count."""
    return re.fullmatch(r"v?\d{1,4}\.\d{1,4}(\.\d{1,4})?(\+.*)?", version, re.DOTALL) is not None
