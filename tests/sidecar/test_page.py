# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.page import build
from kimi_k3.sidecar.settings import Settings


def test_one_answer_is_the_whole_page(tmp_path: Path) -> None:
    """It must work in a cluster that reaches nothing else, under a policy that lets nothing else in."""
    with TestClient(create_app(Settings(state_dir=tmp_path))) as client:
        answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert re.findall(r"<script src|<link rel=.stylesheet|https?://(?!www\.w3\.org)", answer.text) == []
    assert re.findall(r" on[a-z]+=|innerHTML|style=", answer.text) == []
    policy = answer.headers["content-security-policy"]
    for tag in ("style", "script"):
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert texts
        for text in texts:
            assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


def test_head(tmp_path: Path) -> None:
    """Load balancers look with HEAD."""
    with TestClient(create_app(Settings(state_dir=tmp_path))) as client:
        answer = client.head("/")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("text", ["a </SCRIPT> b", "a <!-- b"])
def test_script_that_would_end_itself(text: str) -> None:
    """Such a file would spill into the page as HTML; the sidecar does not start with it."""
    with pytest.raises(ValueError, match=r"a\.js"):
        build('<script src="a.js"></script>', {"a.js": text})
