"""Islands without an accelerator: the product's network and protocol over made deltas.

An island of this kind says hello, reports, takes, sends and fetches as every island
does, over connections of its own. Its model copy is nothing: it encodes no delta, and
drops what it fetches. It joins without fetching the anchors that it would drop. So one
process carries many islands, and what they cost is the wire's cost.
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco_jax.config import Config, shared_fields
from diloco_jax.core.codecs import Codec, get_codec
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import FragmentPlan, Part, PayloadLayout
from diloco_jax.core.tiles import TileGrid
from diloco_jax.data.reader import LeasedPositions
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.hardware.machines import lasting
from diloco_jax.island.link import Link
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.timing import goal_of
from diloco_jax.island.transfers import Fetcher, Lanes, Receiver, Sender
from diloco_jax.protocol.island.boundary import Books, Boundary, Ending
from diloco_jax.protocol.island.conversation import Wanted
from diloco_jax.protocol.island.reporting import Introduction, Status, hello
from diloco_jax.protocol.messages import (
    Hello,
    Measures,
    ProfileRequest,
    ResendRequest,
    lookahead_of,
)
from diloco_jax.wire import peers
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.client import Client
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

STOP_S = 10.0
JOINS_AT_ONCE = 4


class Deltas:
    """An encoded delta of each fragment, which all islands of a process share."""

    def __init__(self, config: Config, plan: FragmentPlan) -> None:
        sync = config.run.sync
        up, down = get_codec(sync.codec_up), get_codec(sync.codec_down)
        self.layouts_up = [PayloadLayout.of(up, f) for f in plan.fragments]
        self.layouts_down = [PayloadLayout.of(down, f) for f in plan.fragments]
        rng = np.random.default_rng(0)
        payloads: dict[tuple[tuple[int, ...], ...], bytearray] = {}
        self._payloads = []
        for fragment, layout in zip(plan.fragments, self.layouts_up, strict=True):
            shapes = tuple(piece.shape for piece in fragment)
            if shapes not in payloads:
                payloads[shapes] = layout.pack(
                    [encoded(up, shape, rng) for shape in shapes]
                )
            self._payloads.append(payloads[shapes])

    def payload(self, fragment: int) -> bytearray:
        """Return the bytes of a fragment's delta."""
        return self._payloads[fragment]


def encoded(
    codec: Codec, shape: tuple[int, ...], rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Return a random delta of one piece."""
    tiles = 1e-3 * rng.standard_normal(TileGrid.of(shape).in_order, np.float32)
    made = np.asarray(codec.encode_tiles(tiles))
    return made.reshape(codec.encoded_shape(shape))


class MadeSender(Sender):
    """A sender whose deltas are made already, so that it copies none."""

    def __init__(self, deltas: Deltas, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._made = deltas

    def _pack(self, parcel: Any) -> None:
        parcel.payload = self._made.payload(parcel.fragment)


class NoDevice:
    """Stands for the exchange of an island: it encodes nothing, and drops what
    arrives."""

    def __init__(self, deltas: Deltas) -> None:
        self.layouts_down = deltas.layouts_down

    def take(self, fragment: int) -> tuple[Any, ...]:
        """See `Arrays.take`."""
        return ()

    def adopt(self, arrival: Any, *, keep: bool) -> None:
        """See `Arrays.adopt`."""

    def judge(self, fragment: int, outcome: Any) -> None:
        """See `Arrays.judge`."""

    def part_down(self, fragment: int) -> Part:
        """See `Exchange.part_down`: the whole payload."""
        return ()

    def anchor_bytes(self, fragment: int) -> int:
        """See `Exchange.anchor_bytes`."""
        return 4 * sum(p.piece.size for p in self.layouts_down[fragment].placed)

    def put_publish(self, fragment: int, octets: Any) -> tuple[Any, ...]:
        """See `Exchange.put_publish`."""
        return ()

    def put_anchor(self, fragment: int, octets: Any) -> tuple[Any, ...]:
        """See `Exchange.put_anchor`."""
        return ()


class SyntheticIsland:
    """One island: `begin` joins, and `step` is a boundary and the step after it."""

    def __init__(
        self,
        config: Config,
        name: str,
        address: str,
        plan: FragmentPlan,
        deltas: Deltas,
    ) -> None:
        config = lasting(config, plan.total)
        self._config, self._name, self._plan = config, name, plan
        self._deadlines = config.placement.deadlines
        self._session = uuid.uuid4().hex
        self._mailbox, self._deltas = Mailbox(), deltas
        placement = config.placement
        client = Client(
            address,
            tls=TlsFiles.load_given(placement.certificates, peers.island(name)),
            deadlines=self._deadlines,
            bulk_channels=placement.bulk_channels,
        )
        self._lanes = Lanes(client, plan.sizes)
        self._link = Link(self._lanes, self._hello, self._mailbox, self._deadlines)
        self._data = LeasedPositions()
        self.done, self.late_s = 0, 0.0
        self._step_s = config.island(name).step_seconds

    def begin(self) -> None:
        """Say hello, and start what the network needs."""
        placement, mailbox = self._config.placement, self._mailbox
        welcome = self._link.connect(placement.outage_budget_s)
        identity = Identity(
            run_id=welcome.run_id,
            island=self._name,
            incarnation=1,
            session=self._session,
        )
        device: Any = NoDevice(self._deltas)
        versions = welcome.versions
        self._sender = MadeSender(
            self._deltas,
            self._lanes,
            identity,
            self._deltas.layouts_up,
            (),
            mailbox,
            self._deadlines,
        )
        self._receiver = Receiver(
            Fetcher(self._lanes, identity, device, mailbox),
            mailbox,
            self._deadlines,
            versions,
            None,
            self._deadlines.budget_s,
        )
        self._receiver.have_all(versions)
        books = Books(list(versions), ADOPT_RULES.find(self._config.run.sync.adopt))
        books.begin()
        self._boundary = Boundary(
            books,
            goal_of(self._config.run, self._config.island(self._name).batch_size),
            arrays=device,
            incoming=mailbox.arrivals,
            outgoing=self._sender,
            data=self._data,
        )
        self._post()
        mailbox.errands = {
            Wanted: self._receiver.want,
            ResendRequest: self._sender.resend,
            ProfileRequest: _profiles_nothing,
        }
        self._link.start()
        self._sender.start()
        self._receiver.start()

    def step(self) -> bool:
        """Act on what came in, and count a step if one is due; return False once the
        island is to end."""
        decision = self._mailbox.decide()
        self._boundary.act(decision, self.done)
        stepping = self._boundary.may_step(self.done)
        batch = self._config.island(self._name).batch_size
        if stepping and self._data.draw(batch) is not None:
            self.done += 1
        self._post()
        if decision.finished or decision.ending is not None:
            self._ending = decision.ending or Ending(
                EXIT_DONE, "the run is over", "finished"
            )
            return False
        return True

    def end(self) -> int:
        """Say goodbye; return the exit code, and say why if it failed."""
        if self._ending.exit_code != EXIT_DONE:
            logger.error("island %s ends: %s", self._name, self._ending.text)
        self._sender.close(STOP_S)
        self._receiver.close(STOP_S)
        self._link.leave(self._ending, STOP_S)
        self._lanes.close()
        return self._ending.exit_code

    def _post(self) -> None:
        measures = Measures(
            steps=self.done,
            median_step_seconds=self._step_s if self.done else 0.0,
            max_step_gap_seconds=self._step_s + self.late_s,
            step_seconds_total=self.done * self._step_s,
        )
        status = self._boundary.status(self.done, measures)
        self._mailbox.post(status, self._boundary.books.drain())

    def _hello(self, status: Status) -> Hello:
        run, island = self._config.run, self._config.island(self._name)
        return hello(
            Introduction(
                island=self._name,
                incarnation=1,
                session=self._session,
                fingerprint=run.fingerprint(),
                run=shared_fields(run),
                plan=self._plan.digest(),
                island_config=dataclasses.asdict(island),
                tokens_per_step=island.batch_size * run.sequence_length,
                sequences_per_step=island.batch_size,
                lookahead=lookahead_of(island.hosts),
            ),
            status,
        )


def _profiles_nothing(_: ProfileRequest) -> None:
    """Leave an operator's request out: a synthetic island computes nothing."""


def train(islands: Sequence[SyntheticIsland], step_s: float) -> Mapping[str, float]:
    """Make the steps of these islands, evenly spread over a step's time, until all have
    ended; return the longest lateness of a step, and the worst exit code."""
    with ThreadPoolExecutor(JOINS_AT_ONCE) as pool:
        list(pool.map(SyntheticIsland.begin, islands))
    began, count = time.monotonic(), len(islands)
    # A step counts when it is over.
    due = [(began + step_s * (1 + i / count), i) for i in range(count)]
    late_s, code = 0.0, EXIT_DONE
    while due:
        at, number = heapq.heappop(due)
        time.sleep(max(0.0, at - time.monotonic()))
        island = islands[number]
        island.late_s = max(island.late_s, time.monotonic() - at)
        late_s = max(late_s, island.late_s)
        if island.step():
            heapq.heappush(due, (max(at + step_s, time.monotonic()), number))
        elif island.end() != EXIT_DONE:
            code = EXIT_FAILED
    return {"late_s": late_s, "exit_code": code}
