"""A coordinator without its state, and islands that are nothing but their messages."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime_support import (
    PATIENCE_S,
    await_message,
    await_state,
    await_that,
    client,
    hello,
    make_config,
    placed,
    report,
)

from diloco_jax.config import Config, ConfigError
from diloco_jax.config.placement import Deadlines
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.coordinator.service import SearchError
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout, get_piece
from diloco_jax.core.tiles import ballot_of
from diloco_jax.models.build import build_plan
from diloco_jax.models.transformer import build
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol import messages
from diloco_jax.protocol.messages import Record, Version
from diloco_jax.wire import bulk
from diloco_jax.wire.client import Client, ControlStream
from diloco_jax.wire.errors import Busy, ConnectionLost, Refused, WireError
from diloco_jax.workdir import read_facts

RUN_ID = "feedfacefeedface"
TOKENS = 500
FRAGMENTS = 8
"""So many that both embeddings are cut into bands."""


class Starting:
    """A coordinator that comes up on a thread, since that takes islands."""

    def __init__(self, config: Config, workdir: Path) -> None:
        self.service = Coordinator(config, workdir, init=False)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        try:
            self.service.start()
        except Exception as error:
            self.error = error

    @property
    def address(self) -> str:
        """Where it listens, once it does."""
        there = lambda: hasattr(self.service, "address")  # noqa: E731
        await_that(there, said=lambda: self.error)
        return self.service.address

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def started(self) -> Coordinator:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.service


@dataclasses.dataclass(frozen=True)
class OneAttempt(Deadlines):
    """Gives a fetch up at its first error, however late that comes."""

    @property
    def pin_s(self) -> float:
        return 0.0


@pytest.fixture
def config(text) -> Config:
    return placed(make_config(text), time_budget_s=PATIENCE_S)


@contextlib.contextmanager
def starting(config: Config, workdir: Path) -> Iterator[Starting]:
    made = Starting(config, workdir)
    try:
        yield made
    finally:
        made.service.close()


def offer(config: Config, island: str, *numbers: int, **fields: Any) -> messages.Hello:
    versions = tuple(Version(1, n) for n in numbers)
    steps, step_tokens = 9, hello(config, island).tokens_per_step
    defaults: dict[str, Any] = {
        "run_id": RUN_ID,
        "phase": "training",
        "steps": steps,
        "step_seconds": 0.1,
        "sequences_granted": 40,
        "term": 1,
        "versions": versions,
        "tokens": TOKENS,
        "own_tokens": steps * step_tokens,
        "next_position": 128,
    }
    return hello(config, island, **{**defaults, **fields})


def anchor(config: Config, fragment: int, value: float, sample: int = 0) -> bytes:
    """One value everywhere; or a ballot of that."""
    pieces = plan_of(config).fragments[fragment]
    codec = get_codec("f32")
    arrays = [np.asarray(codec.encode(jnp.full(p.shape, value))) for p in pieces]
    if not sample:
        return bytes(PayloadLayout.of(codec, pieces).pack(arrays))
    ballots = [ballot_of(array.view("<f4"), sample) for array in arrays]
    return bytes(PayloadLayout.of_ballots(pieces).pack(ballots))


class Answering:
    """An island that sends what it is asked for, until its stream ends. values: of its
    anchors, by fragment; it says at which version each is."""

    def __init__(
        self,
        config: Config,
        at: Client,
        who: messages.Hello,
        stream: ControlStream,
        value: Any = lambda fragment: 0.5,
    ) -> None:
        self.whole = list[int]()
        """Fragments that it was asked for in whole."""
        self._config, self._at, self._who, self._stream = config, at, who, stream
        self._value = value
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        with contextlib.suppress(WireError, AssertionError):
            while True:
                asked = await_message(self._stream, messages.AnchorRequest)
                fragment, sample = asked.fragment, asked.sample
                if not sample:
                    self.whole.append(fragment)
                sent = anchor(self._config, fragment, self._value(fragment), sample)
                version = self._who.versions[fragment]
                start = announced(self._who, fragment, version, len(sent), sample)
                self._at.transfers.upload(start, sent)


def plan_of(config: Config) -> Any:
    return build_plan(config.run, build(config.run.model))


def announced(
    who: messages.Hello,
    fragment: int,
    version: Version | None,
    total: int,
    sample: int = 0,
) -> bulk.UploadStart:
    return bulk.UploadStart(
        run_id=RUN_ID,
        island=who.island,
        incarnation=who.incarnation,
        session=who.session,
        fragment=fragment,
        tick=-1,
        offset=0,
        length=total,
        total=total,
        version=version,
        sample=sample,
    )


def open_when_up(island: Client, who: messages.Hello) -> ControlStream:
    """Says hello until somebody answers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return island.open_control(who)
        except WireError:
            if time.monotonic() >= deadline:
                raise


def test_the_anchors_of_islands_begin_a_new_term(config, tmp_path):
    workdir = tmp_path / "run"
    with (
        starting(config, workdir) as made,
        client(made.address) as at_a,
        client(made.address) as at_b,
    ):
        a, b = offer(config, "a", 3, 5), offer(config, "b", 4, 5)
        to_a = at_a.open_control(a)
        assert (to_a.welcome.term, to_a.welcome.run_id) == (0, RUN_ID)
        assert to_a.welcome.versions == ()
        status = at_a.status(PATIENCE_S)
        assert status["phase"] == "gathering"
        assert status["islands"]["a"]["state"] == "offering"
        with (
            client(made.address) as other,
            pytest.raises(Busy, match="no anchors to offer"),
        ):
            other.open_control(hello(config, "b", session="of a join"))
        payload = anchor(config, 0, 0.5)
        with pytest.raises(Refused, match="not asked for"):
            at_a.transfers.upload(announced(a, 0, Version(1, 3), len(payload)), payload)
        assert not workdir.exists(), "nothing is written before"
        to_b = at_b.open_control(b)
        with pytest.raises(Refused, match="not asked for"):
            at_b.transfers.upload(announced(b, 0, None, 8), bytes(8))
        from_b = Answering(config, at_b, b, to_b, lambda fragment: 0.5 + fragment)
        from_a = Answering(config, at_a, a, to_a, lambda fragment: 0.5 + fragment)
        service = made.started()
        assert read_facts(workdir).run_id == RUN_ID
        assert (from_a.whole, from_b.whole) == ([1], [0])
        (term,) = read_tape(workdir / "tape.jsonl")
        assert (term["kind"], term["term"], term["tokens"]) == ("term", 2, TOKENS)
        assert term["from"] == ["b", "a"]
        params = service.holder.store.params()
        for fragment, pieces in enumerate(plan_of(config).fragments):
            for piece in pieces:
                np.testing.assert_array_equal(
                    get_piece(params, piece), np.float32(0.5 + fragment)
                )
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        try:
            early = bulk.FetchRequest(
                run_id=RUN_ID,
                island="a",
                incarnation=1,
                session=a.session,
                fragment=0,
                want=Version(1, 4),
                have=Version(1, 3),
            )
            with (
                client(made.address, deadlines=OneAttempt(PATIENCE_S)) as other,
                pytest.raises(ConnectionLost, match="not said hello in term 2"),
            ):
                other.transfers.fetch(early, max_bytes=1 << 20)
            back = open_when_up(at_a, a)
            assert (back.welcome.term, back.welcome.resumed) == (2, False)
            assert back.welcome.versions == (Version(2, 4), Version(2, 5))
            granted = await_message(back, messages.Granted)
            assert granted.offset == 40
            assert granted.span.start > 128
            carried = [
                Record(seq=1 + f, kind="carried", step=9, fragment=f, start=8)
                for f in (0, 1)
            ]
            back.send(report(10, *carried))
            progress = await_message(back, messages.Progress)
            assert progress.tokens == TOKENS + a.tokens_per_step
            await_state(
                service,
                lambda s: all(f.accounts["a"].start == 8 for f in s.fragments),
            )
            payload = anchor(config, 0, 0.5)
            late = announced(a, 0, Version(1, 3), len(payload))
            with pytest.raises(Refused, match="has its state, and did not ask for"):
                at_a.transfers.upload(late, payload)
            later = offer(config, "b", term=3)
            with (
                client(made.address) as other,
                pytest.raises(Busy, match="is in term 3"),
            ):
                other.open_control(later)
        finally:
            service.lead.stop()
            thread.join(PATIENCE_S)
    survivor = Coordinator(config, workdir, init=False)
    with contextlib.closing(survivor):
        survivor.start()
        state = survivor.lead.state
        assert [f.version for f in state.fragments] == [Version(2, 4), Version(2, 5)]
        assert {f.accounts["a"].carried_tokens for f in state.fragments} == {
            8 * a.tokens_per_step
        }


def test_anchors_of_bands_make_their_tensors_again(text, tmp_path):
    config = make_config(text, fragments=FRAGMENTS, steps_per_cycle=FRAGMENTS)
    config = placed(config, time_budget_s=PATIENCE_S)
    plan, codec = plan_of(config), get_codec("f32")
    assert {len(p.path) for p in plan.pieces if p.bands} == {1}, "both embeddings"
    params = jax.device_get(build(config.run.model).init(jax.random.key(0)))
    with (
        starting(config, tmp_path / "run") as made,
        client(made.address) as at_a,
        client(made.address) as at_b,
    ):
        a = offer(config, "a", *range(1, FRAGMENTS + 1))
        to_a = at_a.open_control(a)
        b = offer(config, "b", *[0] * FRAGMENTS)
        Answering(config, at_b, b, at_b.open_control(b))
        for _ in range(FRAGMENTS):
            asked = await_message(to_a, messages.AnchorRequest).fragment
            pieces = plan.fragments[asked]
            encoded = [codec.encode(get_piece(params, piece)) for piece in pieces]
            payload = bytes(PayloadLayout.of(codec, pieces).pack(encoded))
            start = announced(a, asked, Version(1, asked + 1), len(payload))
            at_a.transfers.upload(start, payload)
        found = made.started().holder.store.params()
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_if_no_islands_config_fits_the_coordinators_may_be_wrong(config, tmp_path):
    quick = placed(config, time_budget_s=1.0)
    with (
        starting(quick, tmp_path / "run") as made,
        client(made.address, deadlines=Deadlines(4.0)) as island,
    ):
        other = offer(config, "a", 1, 1, fingerprint="another")
        while made.alive:
            with contextlib.suppress(WireError):
                island.open_control(other)
        with pytest.raises(ConfigError, match=r"another there.*this coordinator that"):
            made.started()
    assert not (tmp_path / "run").exists()


def test_two_islands_that_differ_end_the_coordinator_unless_one_is_trusted(
    config, tmp_path, monkeypatch
):
    quick = placed(config, time_budget_s=4.0, outage_budget_s=4.0)
    for trusted in ("", "b"):
        monkeypatch.setattr(Coordinator, "trusted", trusted)
        with (
            starting(quick, tmp_path / f"run{trusted}") as made,
            client(made.address) as at_a,
            client(made.address) as at_b,
        ):
            a, b = offer(config, "a", 3, 5), offer(config, "b", 3, 5)
            Answering(config, at_a, a, at_a.open_control(a), lambda f: 0.5)
            Answering(config, at_b, b, at_b.open_control(b), lambda f: 0.75)
            if trusted:
                made.started()
            else:
                with pytest.raises(SearchError, match="'a' and 'b' have two anchors"):
                    made.started()
    (term,) = read_tape(tmp_path / "runb" / "tape.jsonl")
    assert term["from"] == ["b", "b"]
