"""Real arrays in virtual time: the runtime's own parts behind `Body` and `Merging`.

Bytes are those of the payloads, without headers. A `Diary` notes what an island does
while it runs; the diaries of all become the history.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from diloco_jax.config import DataConfig, IslandConfig, RunConfig
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.core.fragment_merge import MergeResult, Squares, is_fit, length
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.data.reader import BatchReader
from diloco_jax.files import digest_of
from diloco_jax.island.device.build import build_exchange, build_trainer, join, placed
from diloco_jax.island.device.exchange import Replica, Restored
from diloco_jax.island.device.step import Trainer
from diloco_jax.island.mailbox import Arrival
from diloco_jax.island.timing import LOSS_STEPS
from diloco_jax.models.build import build_plan
from diloco_jax.models.model import Model
from diloco_jax.observability.failures import ENDS, NotedFailure
from diloco_jax.observability.history import History, of_rows, outage_rows
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.island.boundary import TakeOutcome
from diloco_jax.protocol.messages import (
    DeltaKey,
    Measures,
    Prepared,
    Version,
)
from diloco_jax.simulation.clock import Clock
from diloco_jax.simulation.coordinator import Received
from diloco_jax.simulation.island import VirtualFetch
from diloco_jax.wire.bulk import FetchSource


@dataclasses.dataclass(kw_only=True)
class Diary:
    """Events of one incarnation of an island, while it runs."""

    island: str
    incarnation: int
    tokens_per_step: int
    began: float
    compile_seconds: float
    ended: float | None = None
    end: str = ""
    steps: int = 0
    """Completed steps; there may be a row of one more, which has begun."""
    rows: list[list[SupportsFloat]] = dataclasses.field(default_factory=list)
    """Begin, seconds, learning rate and loss of each step; 1 if it was skipped, since
    loss or gradient was not finite, else 0; and the sum of the weights of its
    predictions."""
    takes: list[list[float]] = dataclasses.field(default_factory=list)
    """Fragment, time and arrival of each take; NaN if it has not arrived."""
    adoptions: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
    """Fragment, version and time of each adoption."""
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_join: int = 0

    def delivered(self, fragment: int, now: float) -> None:
        """Note that the newest delta of the fragment has arrived."""
        for take in reversed(self.takes):
            if take[0] == fragment:
                take[2] = now
                return

    def measures(self) -> Measures:
        """Return the measures that a real island would report (see `island.timing`)."""
        fields: dict[str, Any] = {
            "compile_seconds": self.compile_seconds,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "bytes_join": self.bytes_join,
        }
        if not self.steps:
            return Measures(**fields)
        done = [list(map(float, row)) for row in self.rows[: self.steps]]
        began, seconds, rates, losses, skipped, predicted = np.array(done).T
        ends = began + seconds
        gaps = np.diff(ends, prepend=began[0])
        losses = losses[predicted > 0][-LOSS_STEPS:]
        return Measures(
            steps=self.steps,
            skipped_steps=int(skipped.sum()),
            tokens_predicted=round(math.fsum(predicted)),
            median_step_seconds=float(np.median(gaps)),
            max_step_gap_seconds=float(np.max(gaps)),
            step_seconds_total=math.fsum(seconds),
            stalled_seconds=max(0.0, math.fsum(gaps) - math.fsum(seconds)),
            loss=statistics.fmean(losses) if losses.size else math.nan,
            learning_rate=float(rates[-1]),
            first_step_unix=float(began[0]),
            last_step_unix=float(ends[-1]),
            **fields,
        )


def deaths(diaries: Sequence[Diary]) -> Iterator[NotedFailure]:
    """Yield the outages of an island, by the diaries of its incarnations."""
    for diary, after in itertools.zip_longest(diaries, diaries[1:]):
        if diary.end == "died":
            steps = after.rows if after is not None else ()
            yield NotedFailure(
                who=diary.island,
                incarnation=diary.incarnation,
                began=diary.ended or 0.0,
                ended=float(steps[0][0]) if steps else None,
                why=ENDS["died"],
                replaced=True,
            )


def collect(
    diaries: Mapping[str, Sequence[Diary]],
    merges: Sequence[tuple[Any, ...]],
    evaluations: Sequence[tuple[float, int, float]],
) -> History:
    """Collect the history of closed diaries; rows as in COLUMNS."""
    steps, takes, adoptions, lives = [], [], [], []
    for d in itertools.chain.from_iterable(diaries.values()):
        who = (d.island, d.incarnation)
        for index, row in enumerate(d.rows[: d.steps]):
            began, seconds, rate, loss, _, predicted = map(float, row)
            loss = loss if predicted else math.nan
            steps.append((*who, index, began, began + seconds, loss, rate))
        takes += [(*who, *take) for take in d.takes]
        adoptions += [(*who, *adoption) for adoption in d.adoptions]
        first = d.rows[0][0] if d.rows else math.nan
        lives.append((*who, d.began, first, d.ended, d.steps, d.end))
    failed = itertools.chain.from_iterable(map(deaths, diaries.values()))
    rows: dict[str, Sequence[tuple[Any, ...]]] = {
        "merges": merges,
        "steps": steps,
        "takes": takes,
        "adoptions": adoptions,
        "lives": lives,
        "outages": outage_rows(failed),
        "evaluations": evaluations,
    }
    return of_rows(tuple(diaries), rows)


class EncodedDelta(NamedTuple):
    """A delta on its way, by piece. It is packed only when it arrives, so that the take
    does not wait for the device.
    """

    layout: PayloadLayout
    pieces: tuple[jax.Array, ...]


NOTED = ("loss", "skipped", "tokens")
"""Metrics of a step that are kept."""
Packed = tuple[npt.NDArray[np.uint8], Squares]
"""A delta's payload, and how long each piece is."""


class SharedFetch(NamedTuple):
    """A fetch that is the same for several islands."""

    source: FetchSource
    placed: dict[Mesh, tuple[tuple[jax.Array, ...], ...]]
    """Its publishes by piece, oldest first, which go to the devices of a mesh once."""


def trainer_of(run: RunConfig, island: IslandConfig) -> tuple[Model, Trainer]:
    """Return the model and its compiled steps.

    Islands that compute alike share them, in this emulation and others of this process.
    """
    rate = RunConfig().inner.learning_rate
    if not run.model.factory:
        inner = dataclasses.replace(run.inner, learning_rate=rate)
        data = DataConfig(
            arrays=run.data.arrays,
            pictures=run.data.pictures,
            picture_tokens=run.data.picture_tokens,
            picture_token=run.data.picture_token,
        )
        # The length bounds the pictures that a delta may count.
        length = run.sequence_length
        run = RunConfig(model=run.model, data=data, inner=inner, sequence_length=length)
    alike = dataclasses.replace(island, step_seconds=0.0, stands_for="")
    return _trainer_of(run, alike)


_trainer_of = functools.lru_cache(maxsize=32)(build_trainer)


class NotedBody:
    """A body that notes in its diary what its island does, and computes nothing.

    bytes_up: bytes of an encoded delta, by fragment.
    """

    def __init__(self, clock: Clock, diary: Diary, bytes_up: Sequence[int]) -> None:
        self.diary = diary
        self._clock, self._bytes_up = clock, bytes_up

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> Restored | None:
        self.diary.bytes_join += sum(part.nbytes for part in fetched.values())
        return None

    def arrival(self, fragment: int, fetched: VirtualFetch) -> Arrival:
        self.diary.bytes_down += fetched.nbytes
        return Arrival(fragment=fragment, version=fetched.version)

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        now = self._clock.now
        self.diary.rows.append([now, math.nan, learning_rate, math.nan, 0.0, 0.0])

    def take(self, fragment: int) -> Any:
        self.diary.takes.append([fragment, self._clock.now, math.nan])
        self.diary.bytes_up += self._bytes_up[fragment]

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        fragment, number = arrival.fragment, arrival.version.number
        self.diary.adoptions.append((fragment, number, self._clock.now))

    def judge(self, fragment: int, outcome: TakeOutcome) -> None: ...


class TrainedBody(NotedBody):
    """Model copy of an incarnation (see `island.Body`), and its diary.

    kept: the moments and residuals that it begins with; None = fresh ones.
    """

    def __init__(
        self,
        run: RunConfig,
        model: Model,
        trainer: Trainer,
        reader: BatchReader,
        clock: Clock,
        diary: Diary,
        kept: Restored | None = None,
    ) -> None:
        self._plan, self._trainer, self._kept = build_plan(run, model), trainer, kept
        self._exchange, _ = build_exchange(run, model, trainer)
        self._reader = reader
        self._replica: Replica
        layouts = self._exchange.layouts_up
        super().__init__(clock, diary, [layout.total_bytes for layout in layouts])

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> Restored | None:
        super().begin(fetched)
        anchors = {f: self._anchor(f, part.data) for f, part in fetched.items()}
        trainer, exchange, begun = self._trainer, self._exchange, self._kept
        if begun is not None:
            begun = placed(begun, trainer, exchange, exchange.put_anchor)
            self._kept = None
        self._replica = join(self._plan, trainer, exchange, anchors, begun)
        return begun

    def arrival(self, fragment: int, fetched: VirtualFetch) -> Arrival:
        published: SharedFetch = fetched.data
        if published.source.full:
            self.diary.bytes_join += fetched.nbytes
            anchor = self._anchor(fragment, published)
            return Arrival(fragment=fragment, version=fetched.version, anchor=anchor)
        arrival = super().arrival(fragment, fetched)
        put = functools.partial(self._exchange.put_publish, fragment)
        placed, mesh = published.placed, self._trainer.mesh
        if mesh not in placed:
            placed[mesh] = tuple(map(put, published.source.buffers))
        return dataclasses.replace(arrival, publishes=placed[mesh])

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        super().train(positions, learning_rate)
        rows = self.diary.rows
        metrics = self._replica.step(self._reader.batch(positions), learning_rate)
        rows[-1][3:] = (metrics[name] for name in NOTED)
        if len(rows) > 1:
            # One step late: the devices have the new step to do meanwhile.
            rows[-2] = list(map(float, rows[-2]))

    def take(self, fragment: int) -> EncodedDelta:
        super().take(fragment)
        layout = self._exchange.layouts_up[fragment]
        return EncodedDelta(layout, self._replica.take(fragment))

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        super().adopt(arrival, keep=keep)
        self._replica.adopt(arrival, keep=keep)

    def judge(self, fragment: int, outcome: TakeOutcome) -> None:
        self._replica.judge(fragment, outcome)

    def _anchor(self, fragment: int, published: SharedFetch) -> tuple[jax.Array, ...]:
        payload = b"".join(published.source.buffers)
        return self._exchange.put_anchor(fragment, payload)


class StoreMerging:
    """The coordinator's `Store` (see `coordinator.Merging`)."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.computed: dict[int, tuple[Merge, MergeResult, str]] = {}
        """Merges that are not current yet, with the digests of their publishes."""
        self._fetched: dict[int, dict[Version | None, VirtualFetch]] = (
            collections.defaultdict(dict)
        )
        """Fetches of the current version, by fragment and by the version held already.
        """

    def receive(self, key: DeltaKey, encoded: EncodedDelta) -> Received:
        payload = np.frombuffer(encoded.layout.pack(encoded.pieces), np.uint8)
        squares = self.store.squares(key.fragment, payload)
        if not is_fit(squares):
            return Received((payload, squares), "non_finite")
        uses = self.store.uses(key.fragment, payload)
        return Received((payload, squares), "", length(squares), *uses)

    def compute(self, merge: Merge, deltas: Sequence[Packed]) -> Prepared:
        payloads, squares = zip(*deltas, strict=True)
        merged = self.store.merge(
            merge.fragment,
            merge.contributions,
            payloads,
            squares,
            share=merge.share,
            final=merge.final,
        )
        digest = digest_of(merged.payload)
        self.computed[merge.fragment] = merge, merged, digest
        return Prepared(digest=digest, payload_bytes=len(merged.payload))

    def commit(self, fragment: int, version: Version) -> None:
        _, merged, _ = self.computed.pop(fragment)
        self.store.commit(fragment, version, merged)
        self._fetched[fragment].clear()

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        fetched = self._fetched[fragment]
        if have not in fetched:
            source = self.store.fetch(fragment, want, have)
            fetched[have] = VirtualFetch(
                source.version, source.total, SharedFetch(source, {})
            )
        return fetched[have]
