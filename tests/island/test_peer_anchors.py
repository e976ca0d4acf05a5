"""Anchors from other islands: real sockets and TLS, real arrays, islands that lie."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import socket
import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from cryptography import x509
from link_support import DEADLINES, WAIT_S

from diloco_jax.config import Config, IslandConfig, Placement, SyncConfig
from diloco_jax.core.fragments import get_piece, plan_fragments
from diloco_jax.core.payload import Box
from diloco_jax.core.tiles import TileGrid, tile_digests
from diloco_jax.deadlines import Deadlines
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.mesh import make_mesh, param_shardings
from diloco_jax.island.mailbox import Arrival
from diloco_jax.island.network.offers import Offers, PeerAnchors, offer
from diloco_jax.protocol.island.fetching import Fetch
from diloco_jax.protocol.values import Version
from diloco_jax.wire import addresses
from diloco_jax.wire.bulk import FetchRequest, Holdings, HoldingsRequest, Identity
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.errors import (
    LocalProtocolError,
    Refused,
    SecurityError,
    VersionGone,
)
from diloco_jax.wire.principal import island
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.wire.transfers import Connections

SHAPES = {
    "embedding": (256, 64),
    "layers": {"w": (3, 64, 96), "norm": (3, 64)},
    "scale": (64,),
    "shift": (64,),
}
AXES = {
    "embedding": ("vocab", "embed"),
    "layers": {"w": ("layers", "embed", "mlp"), "norm": ("layers", "embed")},
    "scale": ("embed",),
    "shift": ("embed",),
}
FRAGMENTS = 2
PLAN = plan_fragments(SHAPES, AXES, FRAGMENTS)
V1, V2 = Version(1, 1), Version(1, 2)
SYNC = SyncConfig(fragments=FRAGMENTS)
NAMES = ("joins", "offers", "lies")


def params_of(seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: random.normal(size=shape).astype("<f4"),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def tiles_in(params, fragment):
    return [
        TileGrid.of(piece.shape).to_tiles(np.asarray(get_piece(params, piece)))
        for piece in PLAN.fragments[fragment]
    ]


def payload_of(params, fragment):
    return b"".join(tiles.tobytes() for tiles in tiles_in(params, fragment))


def exchange_of(params):
    mesh = make_mesh(IslandConfig())
    placed = jax.device_put(params, param_shardings(mesh, AXES, params))
    exchange = Exchange(PLAN, SYNC, placed)
    exchange.start(
        {
            f: exchange.put_anchor(f, payload_of(params, f))
            for f in range(len(PLAN.fragments))
        }
    )
    return exchange


def identity(name, run_id="r"):
    return Identity(run_id=run_id, island=name, incarnation=1, session="s")


class Digests:
    """The coordinator: it has these parameters, at this version."""

    def __init__(self, params, version=V1):
        self.params, self.version, self.asked = params, version, []

    def fetch(self, request, *, max_bytes):
        self.asked.append(request)
        if request.want != self.version:
            raise VersionGone("it has another one")
        assert request.digests, "all values come from other islands"
        layout = exchange_layout(request.fragment)
        found = [
            tile_digests(tiles) for tiles in tiles_in(self.params, request.fragment)
        ]
        cut = layout.cut_values(found, request.part)
        payload = b"".join(c.tobytes() for c in cut)
        assert len(payload) <= max_bytes
        return SimpleNamespace(payload=memoryview(payload))


def exchange_layout(fragment):
    return EXCHANGE.layouts_down[fragment]


EXCHANGE = exchange_of(params_of(0))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, [], 1, islands=NAMES)
    return folder


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def config(certificates):
    ports = []
    for _ in NAMES[1:]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(probe.getsockname()[1])
    offers = ["", *(f"127.0.0.1:{port}" for port in ports)]
    return Config(
        islands={
            name: IslandConfig(offers=address)
            for name, address in zip(NAMES, offers, strict=True)
        },
        placement=Placement(certificates=str(certificates)),
    )


@pytest.fixture
def serve(stack, config):
    """Let an island offer these parameters, at these versions."""

    def start(
        name, params, versions=(V1, V1), run_id="r", is_revoked=lambda serial: False
    ):
        exchange = exchange_of(params)
        who = identity(name, run_id)
        server = offer(config, who, 0, exchange, versions, DEADLINES, is_revoked)
        assert server is not None
        stack.callback(server.stop, 0.0)
        return exchange

    return start


@pytest.fixture
def peers(stack, config):
    def make(coordinator, of=config):
        made = PeerAnchors(of, "joins", identity("joins"), coordinator, DEADLINES)
        stack.callback(made.close)
        return made

    return make


def fetch_of(fragment, want=V1):
    return Fetch(fragment=fragment, want=want, have=None, accepted=None, ticket=b"t")


def only(config, *names):
    islands = {
        name: one if name in names else dataclasses.replace(one, offers="")
        for name, one in config.islands.items()
    }
    return dataclasses.replace(config, islands=islands)


@pytest.mark.parametrize("fragment", range(FRAGMENTS))
def test_an_anchor_comes_from_another_island_as_the_coordinator_has_it(
    serve, peers, config, fragment
):
    params = params_of(1)
    serve("offers", params)
    coordinator = Digests(params)
    fetched = peers(coordinator, only(config, "offers")).fetch(
        fetch_of(fragment), (), exchange_layout(fragment)
    )
    assert bytes(fetched.payload) == payload_of(params, fragment)
    assert (fetched.version, fetched.full) == (V1, True)
    assert fetched.wire_bytes > len(fetched.payload)
    (asked,) = coordinator.asked
    assert asked.ticket == b"t"


def test_a_host_fetches_its_part_alone(serve, peers, config):
    params = params_of(1)
    serve("offers", params)
    layout, fragment = exchange_layout(0), 0
    number, grid = next(
        (n, TileGrid.of(p.shape).grid)
        for n, p in enumerate(PLAN.fragments[0])
        if TileGrid.of(p.shape).grid[0] > 1
    )
    half = (grid[0] // 2, *grid[1:])
    part = (Box(number, (0,) * len(grid), half),)
    found = peers(Digests(params), only(config, "offers")).fetch(
        fetch_of(fragment), part, layout
    )
    expected = layout.cut_values(tiles_in(params, fragment), part)
    assert bytes(found.payload) == b"".join(e.tobytes() for e in expected)


def test_an_island_that_lies_is_named_and_others_are_asked(
    serve, peers, config, caplog
):
    params, lie = params_of(1), params_of(1)
    lie["layers"]["w"][1, 5, 7] *= 1.0001
    serve("offers", params)
    serve("lies", lie)
    made = peers(Digests(params))
    with caplog.at_level(logging.WARNING):
        found = [
            made.fetch(fetch_of(f), (), exchange_layout(f)) for f in range(FRAGMENTS)
        ]
    for fragment, fetched in enumerate(found):
        assert bytes(fetched.payload) == payload_of(params, fragment)
    assert made.count == FRAGMENTS
    alone = peers(Digests(params), only(config, "lies"))
    with caplog.at_level(logging.WARNING):
        results = [
            alone.fetch(fetch_of(f), (), exchange_layout(f)) for f in range(FRAGMENTS)
        ]
    assert None in results, "what it says of the changed tensor is not believed"
    assert any(
        "lies" in r.getMessage() and "1 of" in r.getMessage() for r in caplog.records
    )


@pytest.mark.parametrize("want", [V2, Version(1, 0)])
def test_an_island_at_another_version_is_passed_over(serve, peers, config, want):
    params = params_of(1)
    serve("offers", params)
    made = peers(Digests(params, want), only(config, "offers"))
    assert made.fetch(fetch_of(0, want), (), exchange_layout(0)) is None
    assert not made._failed, "it may have the next one"


def test_what_the_coordinator_has_no_more_is_gone(serve, peers, config):
    params = params_of(1)
    serve("offers", params)
    made = peers(Digests(params, V2), only(config, "offers"))
    with pytest.raises(VersionGone):
        made.fetch(fetch_of(0), (), exchange_layout(0))


def test_an_island_that_is_away_is_asked_once(peers, config, caplog):
    made = peers(Digests(params_of(1)), only(config, "offers"))
    for fragment in range(FRAGMENTS):
        assert made.fetch(fetch_of(fragment), (), exchange_layout(fragment)) is None
    assert sum("offers" in r.getMessage() for r in caplog.records) == 1


def test_an_adopted_version_is_offered_at_once(serve, peers, config):
    params = params_of(1)
    exchange = serve("offers", params)
    mesh = make_mesh(IslandConfig())
    local = jax.device_put(params_of(2), param_shardings(mesh, AXES, params))
    new = params_of(3)
    anchor = exchange.put_anchor(0, payload_of(new, 0))
    exchange.adopt(Arrival(fragment=0, version=V2, anchor=anchor), local)
    fetched = peers(Digests(new, V2), only(config, "offers")).fetch(
        fetch_of(0, V2), (), exchange_layout(0)
    )
    assert bytes(fetched.payload) == payload_of(new, 0)


def test_another_islands_certificate_does_not_offer(stack, serve, config, certificates):
    """The peer that listens at an island's address has to be that island."""
    serve("offers", params_of(1))
    tls = TlsFiles.load(certificates, island("joins"))
    address = config.islands["offers"].offers
    connections = Connections(
        address, tls, DEADLINES, 1, island("lies"), field="islands.lies.offers"
    )
    stack.callback(connections.close)
    with pytest.raises(SecurityError, match=r"islands\.lies\.offers"):
        connections.take()


def test_an_island_with_a_revoked_certificate_gets_no_anchors(
    serve, peers, config, certificates
):
    """The list is in the coordinator's folder, and not in that of the offering one."""
    tls, asked = TlsFiles.load(certificates, island("joins")), []

    def is_revoked(serial):
        asked.append(serial)
        return True

    serve("offers", params_of(1), is_revoked=is_revoked)
    made = peers(Digests(params_of(1)), only(config, "offers"))
    assert made.fetch(fetch_of(0), (), exchange_layout(0)) is None
    (host,) = made._hosts["offers"]
    with pytest.raises(Refused, match=r"of island joins, .* is revoked"):
        host.ask(holdings(), Holdings)
    with pytest.raises(Refused, match="is revoked"):
        host.fetch(values(), max_bytes=1 << 20, within_s=WAIT_S)
    found = x509.load_pem_x509_certificate(tls.certificate_pem)
    assert asked == [found.serial_number], "asked once in a while"


@pytest.mark.parametrize(
    ("request_of", "error", "words"),
    [
        (
            lambda: holdings(run_id="other"),
            Refused,
            "serves run r, the call",
        ),
        (lambda: holdings(island="lies"), Refused, "certificate is that of island"),
        (lambda: holdings(fragment=9), LocalProtocolError, "there are 2"),
        (lambda: values(have=V1), LocalProtocolError, "offers the values of boxes"),
        (lambda: values(part=()), LocalProtocolError, "0 boxes"),
        (
            lambda: values(part=(Box(0, (0, 0), (999, 1)),)),
            LocalProtocolError,
            "none of the",
        ),
        (lambda: values(want=V2), VersionGone, "is not held any more"),
    ],
)
def test_what_it_does_not_offer_is_refused_with_the_reason(
    serve, peers, config, request_of, error, words
):
    serve("offers", params_of(1))
    (host,) = peers(Digests(params_of(1)), only(config, "offers"))._hosts["offers"]
    request = request_of()
    ask = functools.partial(host.ask, kind=Holdings)
    if isinstance(request, FetchRequest):
        ask = functools.partial(host.fetch, max_bytes=1 << 20, within_s=WAIT_S)
    with pytest.raises(error, match=words):
        ask(request)


def holdings(**changes):
    fields = {"run_id": "r", "island": "joins", "fragment": 0}
    return HoldingsRequest(**{**fields, **changes})


def values(**changes):
    fields = {
        **identity("joins").fields(),
        "fragment": 0,
        "want": V1,
        "have": None,
        "part": (Box(0, (0, 0), (1, 1)),),
    }
    return FetchRequest(**{**fields, **changes})


def test_an_address_that_is_taken_costs_the_offer_alone(config, stack, caplog):
    host, port = addresses.parse_address(config.islands["offers"].offers)
    stack.enter_context(socket.create_server((host, port)))
    with caplog.at_level(logging.ERROR):
        who, versions = identity("offers"), [V1, V1]
        found = offer(config, who, 0, EXCHANGE, versions, DEADLINES, pytest.fail)
    assert found is None
    assert "offers no anchors" in caplog.text


def test_the_loop_waits_for_no_copy_and_copies_do_not_stay():
    offers = Offers("r", FRAGMENTS, kept_s=0.0)
    for fragment in range(FRAGMENTS):
        offers.show(fragment, V1, EXCHANGE.held(fragment))
        part = offers.holdings(holdings(fragment=fragment)).part
        offers.fetch(values(fragment=fragment, part=part))
    assert offers._copies
    with offers._lock:  # As while another thread copies.
        offers.show(0, V2, EXCHANGE.held(0))
    assert offers.holdings(holdings()).version == V2
    offers.show(1, V2, EXCHANGE.held(1))
    assert not offers._copies


HOSTS = 8


class Host:
    """Answers once all hosts have been asked."""

    def __init__(self, asked: threading.Barrier, **said: Any) -> None:
        self._asked, self._said = asked, said

    def ask(self, request: HoldingsRequest, answer: type[Holdings]) -> Holdings:
        self._asked.wait(5.0)
        return answer(**self._said)

    def cancel(self) -> None: ...

    def close(self, within_s: float) -> None: ...


def test_all_hosts_of_an_island_are_asked_at_once() -> None:
    config = Config(islands={"a": IslandConfig(), "b": IslandConfig()})
    identity = Identity(run_id="r", island="a", incarnation=1, session="s")
    deadlines = Deadlines(5.0)
    coordinator: Any = None  # It is asked for digests only after the hosts.
    peers = PeerAnchors(config, "a", identity, coordinator, deadlines)
    asked = threading.Barrier(HOSTS)
    hosts: list[Any] = [
        Host(asked, version=Version(1, 7), part=()) for _ in range(HOSTS)
    ]
    peers._hosts["b"] = hosts
    fetch = Fetch(fragment=0, want=Version(1, 8), have=None, accepted=None, ticket=b"t")
    layout: Any = SimpleNamespace(boxes=lambda part: [])
    assert peers.fetch(fetch, (), layout) is None, "they are at another version"
    assert not asked.broken
    assert not peers._failed
    peers.close()
