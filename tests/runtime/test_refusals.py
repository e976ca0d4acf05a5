"""A wrong peer is refused with cause, both values and remedy; the others go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import msgspec
import numpy as np
import pytest
from runtime_support import (
    PATIENCE_S,
    await_message,
    client,
    coordinator,
    hello,
    make_config,
    placed,
    report,
    took,
    upload_start,
    with_run,
)

from diloco_jax.config import Config
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.errors import EXIT_REFUSED
from diloco_jax.island import main
from diloco_jax.island.main import TrainingHost
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol import messages
from diloco_jax.protocol.messages import FIRST_VERSION, Record
from diloco_jax.wire import bulk, peers
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.client import ControlStream
from diloco_jax.wire.errors import (
    LocalProtocolError,
    Refused,
    SecurityError,
)
from diloco_jax.wire.tls import TlsFiles

INCARNATION = 3


class Served(NamedTuple):
    """A coordinator, and the well-behaved island that it serves."""

    config: Config
    service: Coordinator
    stream: ControlStream
    hello: messages.Hello
    take: messages.TakeRequest
    """The take that the island is asked for and does not send."""

    def books(self) -> object:
        """All that a refusal must leave as it is."""
        state = self.service.lead.state
        return (
            state.tick,
            {n: (i.incarnation, i.session) for n, i in state.islands.items()},
            [(f.version, f.phase, f.accounts) for f in state.fragments],
        )

    def answers(self) -> None:
        """The island reports, and hears how far the run is."""
        self.stream.send(report(0))
        await_message(self.stream, messages.Progress)


@pytest.fixture(scope="module")
def served(text, tmp_path_factory) -> Iterator[Served]:
    config = placed(make_config(text, quorum=1), time_budget_s=PATIENCE_S)
    workdir = tmp_path_factory.mktemp("run")
    with coordinator(config, workdir) as service, client(service.address) as island:
        own = hello(config, "a", incarnation=INCARNATION)
        stream = island.open_control(own)
        stream.send(report(2))
        take = await_message(stream, messages.TakeRequest)
        served = Served(config, service, stream, own, take)
        served.answers()
        yield served


@pytest.fixture
def undisturbed(served) -> Iterator[Served]:
    """Whatever the test does, the island that was there does not notice."""
    served.answers()  # What the test before did is booked.
    before = served.books()
    yield served
    served.answers()
    assert served.books() == before


# ---- hellos ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "shown"),
    [
        (
            {"run_id": "0123456789abcdef"},
            "run_id",
            ["run 0123456789abcdef", "check the coordinator's address"],
        ),
        (
            {"fingerprint": "of another config"},
            "config",
            ["of another config", "Start the island with the run's config.json"],
        ),
        (
            {"incarnation": INCARNATION - 1},
            "fenced",
            ["'a' is incarnation 3 now, this is 2", "stop this process"],
        ),
        (
            {"incarnation": INCARNATION},
            "name_in_use",
            [
                "'a' is in use by another process with the same incarnation 3",
                "choose another name, or replace that process by starting incarnat",
            ],
        ),
        (
            {"island": "c"},
            "unknown_island",
            ["no island 'c', only 'b', 'a'", "placement.admit"],
        ),
    ],
)
def test_a_hello_is_refused_for_good(undisturbed, fields, code, shown):
    wrong = msgspec.structs.replace(
        hello(undisturbed.config, session="of a stranger"), **fields
    )
    with (
        client(undisturbed.service.address) as stranger,
        pytest.raises(Refused) as refused,
    ):
        stranger.open_control(wrong)
    assert refused.value.code == code
    for text in shown:
        assert text in refused.value.message


def test_a_refused_island_ends_with_code_3(undisturbed, tmp_path, caplog):
    config, address = with_run(undisturbed.config, seed=1), undisturbed.service.address
    assert main.run(config, "a", address, tmp_path, 1) == EXIT_REFUSED
    assert "seed: 0 here, 1 there" in caplog.text


def test_a_record_of_no_fragment_ends_only_its_session(served):
    for incarnation, fragment in enumerate((2, -1), start=1):
        record = Record(seq=1, kind="took", step=1, fragment=fragment, tick=1)
        own = hello(
            served.config, "b", incarnation=incarnation, session=f"b{incarnation}"
        )
        with client(served.service.address) as stranger:
            stream = stranger.open_control(own)
            stream.send(report(0, record))
            with pytest.raises(LocalProtocolError) as refused:
                await_message(stream, messages.Progress)
        shown = f"of fragment {fragment}, the run has 2; start the island with the run"
        assert shown in str(refused.value)
        served.answers()


# ---- bulk ------------------------------------------------------------------------


@pytest.fixture
def start(served) -> bulk.UploadStart:
    """Start of the upload asked for. Without its record the delta is not merged."""
    run_id = served.service.lead.config.run_id
    total = served.service.holder.store.layouts_up[served.take.fragment].total_bytes
    return upload_start(served.hello, run_id, served.take, total)


def changed(start: bulk.UploadStart, **fields) -> bulk.UploadStart:
    return msgspec.structs.replace(start, **fields)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"run_id": "other"}, ["serves run", "is of run other", "check the coord"]),
        ({"incarnation": 2}, ["incarnation 2 of", "(that is 3)", "stop this process"]),
        ({"island": "x"}, ["island 'x' is not", "(that is unknown)", "stop this"]),
        ({"fragment": 9}, ["no fragment 9", "the run has 2", "sync.fragments"]),
        ({"session": "s"}, ["incarnation 3 of island 'a' is another process than"]),
        ({"tick": 99}, ["fragment 0, tick 99, of island 'a' is not waited for"]),
        ({"fragment": 1}, ["fragment 1, tick 1, of island 'a' is not waited for"]),
    ],
)
def test_a_delta_of_somebody_else_is_refused(undisturbed, start, fields, shown):
    wrong = changed(start, **fields)
    with (
        client(undisturbed.service.address) as stranger,
        pytest.raises(Refused) as refused,
    ):
        stranger.transfers.upload(wrong, bytes(wrong.length))
    for text in shown:
        assert text in refused.value.message


def test_a_delta_of_another_size_is_refused_before_it_is_stored(undisturbed, start):
    wrong = changed(start, length=start.total + 1, total=start.total + 1)
    with (
        client(undisturbed.service.address) as stranger,
        pytest.raises(LocalProtocolError) as refused,
    ):
        stranger.transfers.upload(wrong, bytes(wrong.length))
    expected = f"{wrong.total} bytes, expected {start.total}; start the island with"
    assert expected in str(refused.value)


# ---- deltas that are not numbers -------------------------------------------------


def test_a_delta_that_is_not_finite_is_not_merged(text, tmp_path, caplog):
    config = placed(make_config(text, quorum=1), time_budget_s=PATIENCE_S)
    with (
        caplog.at_level(logging.WARNING),
        coordinator(config, tmp_path) as service,
        client(service.address) as island,
    ):
        streams, hellos = {}, {}
        for name in "ab":
            hellos[name] = hello(config, name)
            streams[name] = island.open_control(hellos[name])
            streams[name].send(report(0))
            await_message(streams[name], messages.Progress)
        streams["a"].send(report(2))
        takes = {n: await_message(s, messages.TakeRequest) for n, s in streams.items()}
        run_id = streams["a"].welcome.run_id
        total = service.holder.store.layouts_up[takes["b"].fragment].total_bytes

        streams["b"].send(report(1, took(takes["b"], seq=1, steps=1)))
        start = upload_start(hellos["b"], run_id, takes["b"], total)
        island.transfers.upload(start, b"\xff" * total)
        verdict = await_message(streams["b"], messages.TakeVerdict)
        assert (verdict.verdict, verdict.reason) == ("refused", "non_finite")
        assert verdict.version == FIRST_VERSION

        streams["a"].send(report(2, took(takes["a"], seq=1, steps=2)))
        start = upload_start(hellos["a"], run_id, takes["a"], total)
        island.transfers.upload(start, bytes(total))
        published = await_message(streams["a"], messages.Published)
        assert (published.verdict.verdict, published.version) == ("merged", (1, 1))
        told = await_message(streams["b"], messages.Published).verdict
        assert (told.verdict, told.reason) == ("refused", "non_finite")
        streams["b"].send(report(1))
        await_message(streams["b"], messages.Progress)
    merges = [r for r in read_tape(tmp_path / "tape.jsonl") if r["kind"] == "merged"]
    assert [[c["island"] for c in m["contributions"]] for m in merges] == [["a"]]
    for leaf in jax.tree.leaves(service.holder.store.params()):
        assert np.isfinite(leaf).all()
    (warning,) = [r.getMessage() for r in caplog.records if "not finite" in r.msg]
    for shown in ("from b, incarnation 1", "all must be", "lower inner.learning_rate"):
        assert shown in warning


# ---- certificates ----------------------------------------------------------------


def test_wrong_and_missing_certificates_are_refused_at_both_ends(text, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        make_certificates(folder, [], 1, islands=["a", "b"])
    config = placed(make_config(text), certificates=str(ours), time_budget_s=PATIENCE_S)
    tls = TlsFiles.load(ours, peers.island("a"))
    with (
        coordinator(config, tmp_path / "run") as service,
        client(service.address, tls=tls) as good,
    ):
        stream = good.open_control(hello(config))
        for folder, shown in (
            ("", "speaks TLS and this process has no certificates; give the folder"),
            (str(theirs), f"does not fit {theirs / 'ca.pem'}"),
        ):
            stranger = placed(
                config,
                certificates=folder,
                time_budget_s=20.0,
                outage_budget_s=4 * PATIENCE_S,
            )
            folder = tmp_path / "b"
            island = TrainingHost(stranger, "b", service.address, folder)
            began = time.monotonic()
            with pytest.raises(SecurityError, match="diloco certs") as refused:
                island.start()
            assert time.monotonic() - began < PATIENCE_S
            island.close()
            assert service.address in str(refused.value)
            assert shown in str(refused.value)
        stream.send(report(0))
        await_message(stream, messages.Progress)
        assert set(service.lead.state.islands) == {"a"}
