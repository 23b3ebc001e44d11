# SPDX-License-Identifier: Apache-2.0
"""The first node, as another one knows it: it is told what happens here, and answers with its own record.

All through the first node's sidecar. So only that has to be found, and the journal of the first node holds
what every rank of the deployment reports. It is asked by a thread of its own: however long it takes to
answer, the loop that looks at the engine goes on.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import ValidationError

from kimi_k3.errors import OperatorError
from kimi_k3.journal.models import NodeReport, RankRecord, RankSummary, SupervisorRecord
from kimi_k3.words.phases import Phase
from kimi_k3.words.text import printable
from kimi_k3.words.tls import trust

INTERVAL_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0
LOST_SECONDS = 180.0
"""A node that nobody has heard of for so long of a start is lost. Longer than a sidecar takes to be started
again: an hour of loading shall not end for that."""

LAST_WORD_SECONDS = 3.0
"""For which a node tries to tell how it ended."""

NO_ROOM = 507
"""What the first node's sidecar answers whose engine serves, and whose state directory takes no record."""

GONE = 410
"""What the first node's sidecar answers to a node whose start is over there."""

SAME_TOKEN = "give all nodes the same KIMI_K3_SIDECAR_TOKEN, profile and image"

WAITED_FOR = (408, 409, GONE, 425, 429)
"""What a node that has not joined yet waits out; any other refusal of its request no waiting would mend."""


@dataclass(frozen=True)
class Told:
    """What a node tells the first one.

    Attributes:
        own: its record.
        ranks: the records of its ranks.
        summaries: what its ranks said in the engine's log; needed where a rank could not write that.
    """

    own: SupervisorRecord
    ranks: tuple[RankRecord, ...] = ()
    summaries: tuple[RankSummary, ...] = ()


class Leader:
    """The first node. All but :meth:`exchange` only tells what is known.

    Attributes:
        may_join: set once this node has passed its own checks: what fails before is nobody else's business.
        ask_now: set to have it asked without waiting.

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
        self.problem: str | None = None
        self.refusal: str | None = None
        self.remedy = SAME_TOKEN
        self.ask_now = threading.Event()
        self.may_join = threading.Event()
        self._start_id: str | None = None
        self._told: dict[int, RankRecord] = {}
        self._told_end = threading.Event()
        self._moved_at = time.monotonic()

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

    def exchange(self, told: Told) -> None:
        """Join the first node's present start, or tell it what happens here; what fails is told next time."""
        if self.refusal is not None:
            return
        if self._start_id is not None:
            self._tell(told, self._start_id)
        elif self.may_join.is_set():
            self._join(told.own)

    def _join(self, own: SupervisorRecord) -> None:
        asked = self._put(own.node, NodeReport(start_id=None, supervisor=own))
        if asked is None:
            return
        # Compared before it joins: a node of another deployment must not end this one.
        if (differs := disagreement(own, asked)) is not None:
            self.remedy, self.refusal = "start all nodes with the same image and options", differs
        elif self._put(own.node, NodeReport(start_id=asked.start_id, supervisor=own)) is not None:
            self._hear(asked)
            self._start_id = asked.start_id

    def _tell(self, told: Told, start_id: str) -> None:
        own = told.own
        written = {rank.rank: rank.summary() for rank in told.ranks}
        report = NodeReport(
            start_id=start_id,
            supervisor=own,
            summaries=tuple(
                each.model_copy(update={"start_id": start_id})
                for each in told.summaries
                if written.get(each.rank) != each
            ),
        )
        answer = self._put(own.node, report)
        if answer is None:
            return
        self._hear(answer)
        for rank in told.ranks:
            if self._told.get(rank.rank) != rank:
                theirs = rank.model_copy(update={"start_id": start_id})
                if self._send(f"/nodes/{own.node}/ranks/{rank.rank}", theirs.model_dump_json()) is None:
                    return
                self._told[rank.rank] = rank
        if own.ending is not None:
            self._told_end.set()

    def wait_for_last_word(self) -> None:
        """Until the first node was told how this one ended, or cannot be told."""
        deadline = time.monotonic() + LAST_WORD_SECONDS
        while self.joined and self.refusal is None and time.monotonic() < deadline:
            self.ask_now.set()
            if self._told_end.wait(0.1):
                return

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
                self.refusal = f"the first node ({self.url}): {self.problem}"
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
            self.refusal = f"the first node ({self.url}): {self.problem}"
        elif answer.status_code == NO_ROOM:
            # A full state directory there does not end what is served.
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
        ("versions", "versions"),
    ):
        here, there = _compared(own, name), _compared(first, name)
        if here != there:
            return f"node {own.node} and the first node differ in their {what}: {here} here, {there} there"
    names = sorted({*own.options, *first.options})
    differing = [name for name in names if own.options.get(name) != first.options.get(name)]
    if differing:
        return f"node {own.node} and the first node differ in {', '.join(differing)}"
    return None


def _compared(record: SupervisorRecord, name: str) -> object:
    """A field; of a checkpoint without its directory's name, which may differ among machines."""
    if name == "checkpoint":
        return record.checkpoint.model_dump(exclude={"name"})
    found: object = getattr(record, name)
    return found


@contextmanager
def told(leader: Leader | None, tell: Callable[[], Told]) -> Iterator[None]:
    """Keeps the first node told until the block ends; without one there is nothing to tell.

    Args:
        leader: the first node, on another one.
        tell: what there is to tell now.
    """
    if leader is None:
        yield
        return
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                leader.exchange(tell())
            except Exception as error:  # a thread's exception would otherwise only be printed
                leader.problem = f"defect of the supervisor: {error!r}"
            leader.ask_now.wait(INTERVAL_SECONDS)
            leader.ask_now.clear()
        leader.close()

    thread = threading.Thread(target=run, name="leader", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leader.wait_for_last_word()
        stop.set()
        # A request under way ends by its own timeout, or never; nobody has to wait for it.
        leader.ask_now.set()
