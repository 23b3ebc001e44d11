# SPDX-License-Identifier: Apache-2.0
"""Who has seen which warning: the sidecar's own file in the state directory.

An acknowledgement holds for a warning's *matter*, what it is about: that of lossy weights is the checkpoint
and the way it was requantised, so it survives restarts and not another conversion; that of a failed start is
the start. One whose matter is no longer there is kept until it is one of too many.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, Field, StringConstraints, ValidationError

from kimi_k3.files import read_small
from kimi_k3.journal.models import Record
from kimi_k3.journal.writer import write_record

ACKNOWLEDGEMENTS_FILE = "acknowledgements.json"
MAX_KEPT = 256
_MAX_BYTES = 1 << 20


_VISIBLE = r"\w"


def _visible(name: str) -> str:
    if re.search(_VISIBLE, name) is None:
        raise ValueError("needs a letter or a digit")
    return name


Name = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=100),
    AfterValidator(_visible),
    Field(json_schema_extra={"pattern": _VISIBLE}),
]
Note = Annotated[str, StringConstraints(strip_whitespace=True, max_length=500)]


class Acknowledgement(Record):
    """Somebody has seen a warning."""

    by: str = Field(description="Who, as they named themselves.")
    at: AwareDatetime = Field(description="When.")
    note: str | None = Field(default=None, description="What they wrote to it.")


class Kept(Record):
    """An acknowledgement with what it is of."""

    id: str
    matter: str
    acknowledgement: Acknowledgement


class Acknowledgements(Record):
    """All that were given, the oldest first."""

    schema_version: Literal[1] = 1
    kept: tuple[Kept, ...] = ()

    def of(self, warning_id: str, matter: str) -> Acknowledgement | None:
        """That of a warning, if there is one."""
        found = [one for one in self.kept if (one.id, one.matter) == (warning_id, matter)]
        return found[-1].acknowledgement if found else None

    def with_one(
        self, warning_id: str, matter: str, *, by: str, note: str | None, at: datetime
    ) -> Acknowledgements:
        """With one more, in place of an earlier one of the same matter."""
        new = Kept(id=warning_id, matter=matter, acknowledgement=Acknowledgement(by=by, at=at, note=note))
        return Acknowledgements(kept=(*self.without(warning_id, matter).kept, new)[-MAX_KEPT:])

    def without(self, warning_id: str, matter: str) -> Acknowledgements:
        """Without that of one warning."""
        return Acknowledgements(
            kept=tuple(one for one in self.kept if (one.id, one.matter) != (warning_id, matter))
        )


def read_acknowledgements(directory: Path) -> tuple[Acknowledgements, str | None]:
    """What the file holds, and why it could not be read where it could not."""
    path = directory / ACKNOWLEDGEMENTS_FILE
    try:
        return Acknowledgements.model_validate_json(read_small(path, limit=_MAX_BYTES)), None
    except FileNotFoundError:
        return Acknowledgements(), None
    except OSError as error:
        return Acknowledgements(), f"cannot be read: {error.strerror or error}"
    except ValidationError:
        return Acknowledgements(), "is not a file of this version"


def write_acknowledgements(directory: Path, acknowledgements: Acknowledgements) -> None:
    """Replace the file.

    Raises:
        OSError: the directory is full, read-only or gone.
    """
    write_record(directory, ACKNOWLEDGEMENTS_FILE, acknowledgements)
