"""The port at which one host of an island offers its anchors, if the config has one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from diloco_jax.config import Config
from diloco_jax.deadlines import Deadlines
from diloco_jax.errors import ConfigError
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.network.offers import Offers
from diloco_jax.protocol.values import Version
from diloco_jax.wire import addresses, principal
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.bulk_server import OfferServer
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)


def offer(
    config: Config,
    identity: Identity,
    host: int,
    exchange: Exchange,
    versions: Sequence[Version],
    deadlines: Deadlines,
    is_revoked: Callable[[int], bool],
) -> OfferServer | None:
    """Offer the anchors that the exchange holds, at these versions, and those that it
    adopts later; return what serves them. is_revoked: asks the coordinator.

    Returns None if the config has no address for this host, or if it cannot be bound:
    the island trains all the same.
    """
    name, placement = identity.island, config.placement
    offered_at = config.island(name).offered_at
    if not offered_at:
        return None
    address = offered_at[host]
    try:
        addresses.require_tls(
            address, tls=bool(placement.certificates), insecure=placement.insecure
        )
        listener = addresses.listen(addresses.resolve(address))
    except ConfigError as error:
        logger.error(
            "island %s offers no anchors: %s; islands that join fetch them elsewhere",
            name,
            error,
        )
        return None
    offers = Offers(len(versions), deadlines.pin_s)
    for fragment, version in enumerate(versions):
        offers.show(fragment, version, exchange.held(fragment))
    exchange.adopted = offers.show
    server = OfferServer(
        offers,
        identity.run_id,
        tls=TlsFiles.load_given(placement.certificates, principal.island(name)),
        deadlines=deadlines,
        max_hosts=sum(island.hosts for island in config.islands.values()),
        bulk_channels=placement.bulk_channels,
        is_revoked=is_revoked,
    )
    server.start(listener)
    logger.info("island %s offers its anchors at %s", name, address)
    return server
