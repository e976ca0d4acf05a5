"""Ask the coordinator for the run's config, before anything is built."""

from __future__ import annotations

import time

from diloco_jax.config import Config
from diloco_jax.config.loading import from_builtins
from diloco_jax.config.resolving import with_model_of
from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.island.network.link import Awaited
from diloco_jax.wire import principal
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import ConnectionLost, SecurityError
from diloco_jax.wire.tls import TlsFiles


def ask_config(
    address: str,
    name: str,
    *,
    certificates: str,
    insecure: bool,
    deadlines: Deadlines,
    patience_s: float = 0.0,
) -> Config:
    """Return the run's config, as the coordinator at HOST:PORT gives it to the island
    of this name.

    patience_s: seconds for which a coordinator that is not there is tried again.

    Raises:
      ConnectionLost: it is not there. SecurityError: it cannot be trusted.
      ConfigError: it is of another version.
    """
    tls = TlsFiles.load_given(certificates, principal.island(name))
    client = Client(
        address, tls=tls, deadlines=deadlines, bulk_channels=1, insecure=insecure
    )
    began, suspicious = time.monotonic(), False
    until, awaited = began + patience_s, Awaited(deadlines, began)
    pauses = Backoff(deadlines)
    try:
        while True:
            try:
                found = client.config(deadlines.connect_s)
                return from_builtins(found, client.address)
            except (ConnectionLost, SecurityError) as error:
                # A coordinator that ends may look like one that cannot be trusted.
                lasting = isinstance(error, SecurityError) and suspicious
                now = time.monotonic()
                if lasting or now >= until:
                    raise
                awaited.tell(error, now, until)
                pause_s = pauses.next_s()
                if isinstance(error, SecurityError):
                    suspicious, pause_s = True, deadlines.retry_max_s
            time.sleep(pause_s)
    finally:
        client.close()


def with_model_of_run(config: Config, name: str, address: str) -> Config:
    """Return the config with the run's model, which the coordinator knows.

    If the run started from weights, only the coordinator has read their config.json. A
    config that names weights or a factory itself is returned unchanged.
    """
    if config.run.model.weights or config.run.model.factory:
        return config
    placement = config.placement
    theirs = ask_config(
        address,
        name,
        certificates=placement.certificates,
        insecure=placement.insecure,
        deadlines=placement.deadlines,
        patience_s=placement.away_s,
    )
    return with_model_of(theirs.run, config)
