"""`diloco certs DIR --hosts HOST... --islands NAME... [--add | --revoke WHO...]`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_jax.config.config import check_name
from diloco_jax.config.fields import NOT_NEGATIVE, positional, setting
from diloco_jax.config.options import parse
from diloco_jax.errors import ConfigError, suggest


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """The options of `diloco certs`."""

    folder: Path = positional(metavar="DIR", help="Folder of the certificates.")
    hosts: tuple[str, ...] = setting(
        (),
        help="Names and addresses at which islands reach the coordinator, besides "
        "localhost; without any, only its own machine reaches it.",
    )
    islands: tuple[str, ...] = setting(
        (),
        help="Names of islands, as the config has them: each gets a key of its own. "
        "With --add, those that have one get another.",
    )
    workers: int = setting(
        0,
        NOT_NEGATIVE,
        help="Workers of the coordinator (placement.workers) that get a key of their "
        "own.",
    )
    revoke: tuple[str, ...] = setting(
        (),
        metavar="[WHO [WHO ...]]",
        help="Shut out whoever has these certificates, by the names of their files "
        "(island.v6e): the coordinator reads DIR's revoked.txt while it runs.",
    )
    days: int = setting(365, help="Days for which the certificates are valid.")
    add: bool = setting(False, help="Add hosts or islands to DIR's authority.")
    replace: bool = setting(False, help="Replace DIR's authority.")


def certs_command(arguments: Sequence[str]) -> int:
    """Make a run's authority and certificates, or add to them."""
    (options,) = parse(
        [CertsOptions],
        arguments,
        "diloco certs",
        "Make a run's authority and certificates for mutual TLS.",
    )
    if options.add + options.replace + bool(options.revoke) > 1:
        raise ConfigError("--add, --replace and --revoke: choose one of them")
    from diloco_jax.wire import certificates

    folder, limit = options.folder, certificates.CA_DAYS
    if not 1 <= options.days <= limit:
        raise ConfigError(
            f"--days {options.days}: certificates are valid for 1 day to the "
            f"authority's own {limit} days; choose from these"
        )
    for name in options.islands:
        check_name(name)
    try:
        if options.revoke:
            _revoke(folder, options.revoke)
            return 0
        named: dict[str, Any] = {
            "islands": options.islands,
            "workers": options.workers,
        }
        if options.add:
            certificates.add(folder, options.hosts, options.days, **named)
        else:
            certificates.make_certificates(
                folder, options.hosts, options.days, replace=options.replace, **named
            )
    except OSError as error:
        raise ConfigError(
            f"cannot write certificates to {folder}: {error.strerror}; give a folder "
            f"that is writable"
        ) from error
    names = ", ".join(certificates.coordinator_names(folder))
    here = certificates.principals(folder)
    islands = ", ".join(who.name for who in here if who.role == "island")
    print(
        f"certificates in {folder}, of a coordinator called {names}, and of "
        f"{f'islands {islands}' if islands else 'no island (--add --islands NAME)'}. "
        f"Give each machine, as --certificates, a folder with ca.pem and its own "
        f".pem and .key: coordinator.* and worker.*, island.NAME.*, or "
        f"reader.* to look on; ca.key to none",
        file=sys.stderr,
    )
    return 0


def _revoke(folder: Path, stems: Sequence[str]) -> None:
    """Revoke certificates, all of which must be known."""
    from diloco_jax.wire.certificates import issued, revoke
    from diloco_jax.wire.principal import REVOKED, of_stem

    here = {one.stem for one in issued(folder)}
    for stem in stems:
        if stem not in here:
            known = ", ".join(sorted(here)) or "none"
            raise ConfigError(
                f"--revoke {stem}: {folder} has no certificate of that name"
                f"{suggest(stem, here)}; it has {known}"
            )
    for stem in dict.fromkeys(stems):
        who = of_stem(stem)
        assert who is not None
        numbers = ", ".join(f"{serial:x}" for serial in revoke(folder, who))
        print(
            f"{who}: serial numbers in hex {numbers}, in {folder / REVOKED}; a "
            f"coordinator whose folder that is shuts them out within seconds, others "
            f"need the file beside their coordinator.pem",
            file=sys.stderr,
        )
