# SPDX-License-Identifier: Apache-2.0
"""The first node, as another one knows it: it is told what happens here, and answers with its own record.

All through the first node's sidecar. So only that has to be found, and the journal of the first node holds
what every rank of the deployment reports.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from pydantic import ValidationError

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import NodeReport, RankRecord, SupervisorRecord
from kimi_k3.words.phases import Phase
from kimi_k3.words.text import printable
from kimi_k3.words.tls import trust

INTERVAL_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0
LOST_SECONDS = 180.0
"""A node that nobody has heard of for so long of a start is lost. Longer than a sidecar takes to be started
again: an hour of loading shall not end for that."""

GONE = 410
"""What the first node's sidecar answers to a node whose start is over there."""

WAITED_FOR = (408, 409, GONE, 425, 429)
"""What a node that has not joined yet waits out; any other refusal of its request no waiting would mend."""


class Leader:
    """The first node.

    Args:
        url: of its sidecar.
        token: of its sidecar.
        authorities: by which its certificate is checked; ``None`` for the system's.
        transport: instead of the network.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        authorities: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url
        self.record: SupervisorRecord | None = None
        self.problem = "it has not been asked yet"
        self.refusal: str | None = None
        self._start_id: str | None = None
        self._told: dict[int, RankRecord] = {}
        self._moved_at = time.monotonic()
        self._one_at_a_time = threading.Lock()

        def connect() -> httpx.Client:
            return httpx.Client(
                base_url=url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=TIMEOUT_SECONDS,
                verify=trust(url, authorities) if url.startswith("https:") else True,
                trust_env=False,
                transport=transport,
            )

        self._connect: Callable[[], httpx.Client] = connect
        self._client = self._connect()

    @property
    def joined(self) -> bool:
        """Whether this node is part of a start of the first one."""
        return self._start_id is not None

    @property
    def phase(self) -> Phase:
        """The first node's phase in the start that this node has joined."""
        return Phase.PENDING if self.record is None or not self.joined else self.record.phase

    def silence(self) -> float:
        """Seconds since something new was heard of the first node, by this node's clock.

        Its sidecar lives longer than its supervisor, and goes on answering with that one's last record.
        """
        return time.monotonic() - self._moved_at

    def join(self, own: SupervisorRecord) -> bool:
        """Try to become part of the first node's present start; returns whether that worked.

        Raises:
            OperatorError: the first node refuses this one for good, or the two were started differently.
        """
        asked = self._put(own.node, NodeReport(start_id=None, supervisor=own))
        # Compared before it joins: a node of another deployment must not end this one.
        if asked is not None and (differs := disagreement(own, asked)) is not None:
            raise OperatorError(differs, remedy="start all nodes with the same image and options")
        if asked is not None and self._put(own.node, NodeReport(start_id=asked.start_id, supervisor=own)):
            self._start_id = asked.start_id
            self._hear(asked)
        if self.refusal is not None:
            raise OperatorError(
                f"the first node ({self.url}): {self.refusal}",
                remedy="give all nodes the same KIMI_K3_SIDECAR_TOKEN, profile and image",
                exit_code=ExitCode.USAGE,
            )
        return self.joined

    def tell(self, own: SupervisorRecord, ranks: Sequence[RankRecord] = ()) -> None:
        """Tell the first node what happens here, if this one has joined it; what failed is told next time.

        Args:
            own: this node's record.
            ranks: of this node.
        """
        if self._start_id is None or self.refusal is not None:
            return
        # The loop that looks at the engine asks, too, when that is gone.
        with self._one_at_a_time:
            answer = self._put(own.node, NodeReport(start_id=self._start_id, supervisor=own))
            if answer is None:
                return
            self._hear(answer)
            for rank in ranks:
                if self._told.get(rank.rank) != rank:
                    theirs = rank.model_copy(update={"start_id": self._start_id})
                    if self._send(f"/nodes/{own.node}/ranks/{rank.rank}", theirs.model_dump_json()) is None:
                        return
                    self._told[rank.rank] = rank

    def _hear(self, record: SupervisorRecord) -> None:
        if self.record is None or record.updated_at != self.record.updated_at:
            self._moved_at = time.monotonic()
        self.record = record

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _put(self, node: int, report: NodeReport) -> SupervisorRecord | None:
        answer = self._send(f"/nodes/{node}", report.model_dump_json())
        if answer is None:
            return None
        try:
            return SupervisorRecord.model_validate_json(answer.content)
        except ValidationError:
            self.problem = "answers with what this version does not understand"
            if not self.joined:
                self.refusal = self.problem
            return None

    def _send(self, path: str, body: str) -> httpx.Response | None:
        """The answer; ``None``, and :attr:`problem` or :attr:`refusal`, if it is no good one."""
        try:
            answer = self._client.put(path, content=body, headers={"Content-Type": "application/json"})
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            self.problem = printable(str(error) or type(error).__name__)
            # The authority may have been renewed since its file was read.
            with contextlib.suppress(OperatorError):
                anew = self._connect()
                self._client.close()
                self._client = anew
            return None
        if answer.is_success:
            return answer
        self.problem = printable(f"HTTP {answer.status_code}: {_detail(answer)}")
        if self.joined:
            final = answer.status_code == GONE
        else:
            final = answer.status_code < 500 and answer.status_code not in WAITED_FOR
        if final:
            self.refusal = self.problem
        elif answer.status_code >= 500:
            # A state directory without room there takes no record, and does not end what is served.
            self._moved_at = time.monotonic()
        return None


def _detail(answer: httpx.Response) -> str:
    try:
        detail = json.loads(answer.content)["detail"]
    except (ValueError, KeyError, TypeError):
        return answer.text
    return str(detail)


def disagreement(own: SupervisorRecord, first: SupervisorRecord) -> str | None:
    """What this node and the first one were told differently; ``None`` if nothing."""
    for name, what in (
        ("profile", "profile"),
        ("nodes", "number of nodes"),
        ("world_size", "number of ranks"),
        ("stages", "pipeline stages"),
        ("checkpoint", "checkpoint"),
        ("weights", "weights"),
        ("requantisation", "conversion"),
        ("served_model_name", "model name"),
    ):
        here, there = _compared(own, name), _compared(first, name)
        if here != there:
            return f"node {own.node} and the first node differ in their {what}: {here} here, {there} there"
    return None


def _compared(record: SupervisorRecord, name: str) -> object:
    """A field; of a checkpoint without its directory's name, which may differ among machines."""
    if name == "checkpoint":
        return record.checkpoint.model_dump(exclude={"name"})
    found: object = getattr(record, name)
    return found


@contextmanager
def told(
    leader: Leader | None, own: Callable[[], SupervisorRecord], ranks: Callable[[], Sequence[RankRecord]]
) -> Iterator[None]:
    """Keeps the first node told until the block ends; without one there is nothing to tell."""
    if leader is None:
        yield
        return
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(INTERVAL_SECONDS):
            leader.tell(own(), ranks())

    thread = threading.Thread(target=run, name="leader", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(TIMEOUT_SECONDS)
