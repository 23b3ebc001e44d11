# SPDX-License-Identifier: Apache-2.0
"""An authority and what it signs, for the tests of TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Signed:
    """PEM files: a server's certificate, its key, and the authority's certificate."""

    certificate: Path
    key: Path
    authority: Path


def signed(directory: Path, *names: str) -> Signed:
    """A certificate for ``names``, of an authority that nobody else knows."""
    directory.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    made = authority.issue_cert(*names)
    found = Signed(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")
    found.certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    found.key.write_bytes(made.private_key_pem.bytes())
    authority.cert_pem.write_to_path(found.authority)
    return found
