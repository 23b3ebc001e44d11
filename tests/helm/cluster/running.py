# SPDX-License-Identifier: Apache-2.0
"""A cluster for the length of a test."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
import yaml

from tests.helm.cluster.api import Api
from tests.helm.cluster.controllers import Controllers, Node
from tests.helm.cluster.kinds import BUILT_IN, MONITORING, Kind
from tests.helm.cluster.store import Object, Store


@dataclass
class Cluster:
    """What a test sees of it; ``failing`` are names of pods that end with an error."""

    url: str
    store: Store
    api: Api
    failing: set[str] = field(default_factory=set)

    def kubeconfig(self, directory: Path) -> Path:
        """A file that leads ``helm`` and ``kubectl`` here."""
        path = directory / "kubeconfig"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def runs(self, pod: Object) -> bool:
        """Whether a pod that ends by itself does well."""
        return pod["metadata"]["name"] not in self.failing


@contextlib.contextmanager
def running_cluster(
    nodes: Sequence[Node], *, minor: str = "1.35", further: Iterable[Kind] = MONITORING
) -> Iterator[Cluster]:
    """A cluster of these nodes; it is gone when the block ends."""
    store = Store()
    kinds = (*BUILT_IN, *further)
    api = Api(store, kinds, minor, lambda pod: f"log of {pod['metadata']['name']}\n")
    for name in ("default", "kube-system"):
        store.create(kinds[0], "", {"metadata": {"name": name}})
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        cluster = Cluster(f"http://127.0.0.1:{listener.getsockname()[1]}", store, api)
        controllers = Controllers(store, nodes, cluster.runs)
        configuration = uvicorn.Config(api.app(), log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(configuration)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        controllers.start()
        try:
            yield cluster
        finally:
            controllers.stop()
            server.should_exit = True
            thread.join()
