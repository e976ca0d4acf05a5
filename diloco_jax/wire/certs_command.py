"""`diloco certs DIR --hosts NAME... [--add]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.config import ConfigError


def certs_command(arguments: Sequence[str]) -> int:
    """Makes a run's authority and certificates, or adds to them."""
    parser = argparse.ArgumentParser(
        prog="diloco certs",
        description="Makes a run's authority and certificates (mutual TLS).",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names and addresses at which islands reach the coordinator, besides "
        "localhost; without any, the coordinator is reached from its own machine only",
    )
    parser.add_argument(
        "--days", type=int, default=365, help="validity (default: %(default)s)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--add", action="store_true", help="add hosts to DIR's authority")
    how.add_argument("--replace", action="store_true", help="replace DIR's authority")
    options = parser.parse_args(arguments)
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
