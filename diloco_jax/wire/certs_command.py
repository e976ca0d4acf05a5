"""`diloco certs DIR --hosts NAME... [--add]`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.config.fields import positional, setting
from diloco_jax.errors import ConfigError
from diloco_jax.options import parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """The options of `diloco certs`."""

    folder: Path = positional(metavar="DIR", help="Folder of the certificates.")
    hosts: tuple[str, ...] = setting(
        (),
        help="Names and addresses at which islands reach the coordinator, besides "
        "localhost; without any, only its own machine reaches it.",
    )
    days: int = setting(365, help="Days for which the certificates are valid.")
    add: bool = setting(False, help="Add hosts to DIR's authority.")
    replace: bool = setting(False, help="Replace DIR's authority.")


def certs_command(arguments: Sequence[str]) -> int:
    """Make a run's authority and certificates, or add to them."""
    (options,) = parse(
        [CertsOptions],
        arguments,
        "diloco certs",
        "Make a run's authority and certificates for mutual TLS.",
    )
    if options.add and options.replace:
        raise ConfigError("--add with --replace: choose one of them")
    from diloco_jax.wire.certificates import (
        CA_DAYS,
        add_names,
        coordinator_names,
        make_certificates,
    )

    if not 1 <= options.days <= CA_DAYS:
        raise ConfigError(
            f"--days {options.days}: certificates are valid for 1 day to the "
            f"authority's own {CA_DAYS} days; choose from these"
        )
    try:
        if options.add:
            add_names(options.folder, options.hosts, options.days)
        else:
            make_certificates(
                options.folder, options.hosts, options.days, replace=options.replace
            )
    except OSError as error:
        raise ConfigError(
            f"cannot write certificates to {options.folder}: {error.strerror}; give a "
            f"folder that is writable"
        ) from error
    names = ", ".join(coordinator_names(options.folder))
    print(
        f"certificates in {options.folder}, of a coordinator called {names}. Give each "
        f"machine a folder with its role's files as --certificates: ca.pem and "
        f"coordinator.*, or ca.pem and island.*; ca.key to none",
        file=sys.stderr,
    )
    return 0
