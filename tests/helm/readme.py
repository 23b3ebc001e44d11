# SPDX-License-Identifier: Apache-2.0
"""The chart's README, made of its values and their comments: ``python -m tests.helm.readme``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tests.helm.rendering import CHART

FILE = CHART / "README.md"
ABOUT = """\
<!-- Made by `python -m tests.helm.readme` from values.yaml; edit that. -->
# kimi-k3-gfx942

{description}. How it is installed, upgraded and looked into: [docs/kubernetes.md](../../docs/kubernetes.md).

```
helm install k3 helm/kimi-k3-gfx942 --namespace kimi-k3 --create-namespace \\
  --set model.hostPath=/mnt/models/Kimi-K3 --set weights.acceptLossy=true
```

Kubernetes {kubernetes}, Helm 3.19 or 4.

| value | default | what it is |
|---|---|---|
"""
MARK = "# -- "


@dataclass(frozen=True)
class Entry:
    """One documented value."""

    path: str
    default: Any
    about: str


def entries() -> list[Entry]:
    """Every value with a comment that begins with ``# --``, in the order of the file."""
    text = (CHART / "values.yaml").read_text()
    return [
        Entry(path, _at(yaml.safe_load(text), path), about) for path, about in _documented(text.splitlines())
    ]


def readme() -> str:
    """The whole file."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    head = ABOUT.format(
        description=chart["description"],
        kubernetes=chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0") + " or newer",
    )
    rows = [f"| `{one.path}` | `{json.dumps(one.default)}` | {one.about} |" for one in entries()]
    return head + "\n".join(rows) + "\n"


def _documented(lines: list[str]) -> Iterator[tuple[str, str]]:
    about: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in lines:
        bare = line.strip()
        if bare.startswith(MARK):
            about = [bare.removeprefix(MARK)]
        elif bare.startswith("# ") and about:
            about.append(bare.removeprefix("# "))
        elif ":" in bare and not bare.startswith(("#", "-")):
            depth, name = len(line) - len(line.lstrip()), bare.split(":")[0]
            parents = [one for one in parents if one[0] < depth] + [(depth, name)]
            if about:
                yield ".".join(one for _, one in parents), " ".join(about)
            about = []


def _at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values


if __name__ == "__main__":
    FILE.write_text(readme())
