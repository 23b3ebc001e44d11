# SPDX-License-Identifier: Apache-2.0
"""Who listens on a port, by the kernel's tables."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kimi_k3.supervisor.listening import is_foreign

OWN = os.getpid()


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_listener_is_found_among_the_engines_processes(family: socket.AddressFamily, host: str) -> None:
    """Of both families; a process that is gone changes nothing."""
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        port = listener.getsockname()[1]
        assert not is_foreign(port, []), "it is bound and does not listen"
        listener.listen()
        assert is_foreign(port, [])
        assert is_foreign(port, [2**22 + 1])
        assert not is_foreign(port, [2**22 + 1, OWN])


def test_who_cannot_be_told_is_not_foreign(tmp_path: Path) -> None:
    """A kernel without these tables, or processes of another user, must not end a start."""
    (tmp_path / "self/net").mkdir(parents=True)
    assert not is_foreign(80, [OWN], proc=tmp_path)
    row = "   0: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1"
    (tmp_path / "self/net/tcp").write_text(f"  sl  local_address\n{row}\n")
    assert is_foreign(80, [OWN], proc=tmp_path)
    (tmp_path / str(OWN)).mkdir()
    (tmp_path / str(OWN) / "fd").write_text("no directory: reading it is an OSError")
    assert not is_foreign(80, [OWN], proc=tmp_path)
