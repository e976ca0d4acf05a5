"""What an operator asks of one island: `diloco admit NAME --coordinator HOST:PORT
[--remove]`, `diloco release NAME` and `diloco profile NAME [--steps N]`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from diloco_jax.config import ConfigError, Placement
from diloco_jax.config.fields import Bound, positional, setting
from diloco_jax.config.validation import check_name
from diloco_jax.errors import EXIT_DONE
from diloco_jax.options import parse
from diloco_jax.protocol.messages import MOST_STEPS, ProfileOrder, Steer

if TYPE_CHECKING:
    from diloco_jax.wire.client import Client


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneIslandOptions:
    """The options of a command by which an operator asks a coordinator for something
    about one island."""

    name: str = positional(metavar="NAME", help="Name of the island.")
    coordinator: str = setting(
        "",
        metavar="HOST:PORT or WORKDIR",
        help="The run's coordinator, or its workdir on this machine.",
    )
    certificates: str = setting(
        "", help="Folder made by diloco certs, with the operator's files."
    )
    insecure: bool = setting(
        False, help="Ask an address that is not loopback without TLS."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmitOptions(OneIslandOptions):
    """The options of `diloco admit`."""

    remove: bool = setting(False, help="Put the island out, and let it in no longer.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileOptions(OneIslandOptions):
    """The options of `diloco profile`."""

    steps: int = setting(5, Bound(1, MOST_STEPS), help="Whole steps in the trace.")


def admit_command(arguments: Sequence[str]) -> int:
    """Let an island in that the run's config does not name, or put it out."""
    (options,) = parse(
        [AdmitOptions],
        arguments,
        "diloco admit",
        "Let an island into a run that goes on, although the run's config does not "
        "name it. It stays admitted when the coordinator is started again.",
    )
    order = Steer(how="remove" if options.remove else "admit", island=options.name)
    admitted = _steer(options, order)["admitted"]
    done = "is let in no longer" if options.remove else "is let in"
    print(
        f"island {options.name} {done}; besides those of the config: "
        f"{', '.join(admitted) or 'none'}",
        file=sys.stderr,
    )
    return EXIT_DONE


def release_command(arguments: Sequence[str]) -> int:
    """End an island's quarantine."""
    (options,) = parse(
        [OneIslandOptions],
        arguments,
        "diloco release",
        "Let the deltas of a quarantined island be merged again at once.",
    )
    apart = _steer(options, Steer(how="release", island=options.name))["quarantined"]
    print(
        f"island {options.name} is in no quarantine; still in it: "
        f"{', '.join(apart) or 'none'}",
        file=sys.stderr,
    )
    return EXIT_DONE


def profile_command(arguments: Sequence[str]) -> int:
    """Have an island trace its next steps; return once it is asked."""
    (options,) = parse(
        [ProfileOptions],
        arguments,
        "diloco profile",
        "Have an island that trains trace its next steps with jax.profiler. Its host 0 "
        "writes the trace into its own workdir, in profiles/NAME-STEP.",
    )
    with operator_of(options) as (client, patience_s):
        order = ProfileOrder(island=options.name, steps=options.steps)
        told = client.profile(order, patience_s)
    print(
        f"island {options.name} traces its next {options.steps} steps into "
        f"{told['folder']} of its workdir, on the machine of its host 0; its log says "
        f"when the trace is there, or why there is none",
        file=sys.stderr,
    )
    return EXIT_DONE


def _steer(options: OneIslandOptions, order: Steer) -> dict[str, list[str]]:
    """Have the coordinator do it; return its answer."""
    with operator_of(options) as (client, patience_s):
        return client.steer(order, patience_s)


@contextlib.contextmanager
def operator_of(options: OneIslandOptions) -> Iterator[tuple[Client, float]]:
    """Yield a connection with an operator's key, and the longest wait for an answer."""
    check_name(options.name)
    if not options.coordinator:
        raise ConfigError("--coordinator is missing: HOST:PORT, or the run's workdir")
    with operator_at(
        options.coordinator,
        Placement(certificates=options.certificates, insecure=options.insecure),
    ) as operator:
        yield operator


@contextlib.contextmanager
def operator_at(target: str, given: Placement) -> Iterator[tuple[Client, float]]:
    """Do so for a coordinator at HOST:PORT, or that of a workdir."""
    from diloco_jax.cluster.status import reached
    from diloco_jax.wire.client import Client
    from diloco_jax.wire.principal import OPERATOR
    from diloco_jax.wire.tls import TlsFiles

    address, placement = reached(target, given)
    client = Client(
        address,
        tls=TlsFiles.load_given(placement.certificates, OPERATOR),
        deadlines=placement.deadlines,
        bulk_channels=0,
        insecure=placement.insecure,
    )
    try:
        yield client, 2 * placement.deadlines.budget_s
    finally:
        client.close()
