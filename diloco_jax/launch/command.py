"""`diloco launch CONFIG --on tpu_vm|gke|sky`: from the config to running machines."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from diloco_jax.config import Config, ConfigError, LaunchConfig, suggest
from diloco_jax.config.fields import NOT_NEGATIVE, POSITIVE, setting
from diloco_jax.config.resolving import LONG, filled
from diloco_jax.files import absolute, is_bucket
from diloco_jax.launch import gke, sky, tpu_vm
from diloco_jax.launch.spec import (
    COORDINATOR,
    WORKDIR,
    Backend,
    LaunchSpec,
    make_spec,
    resource_name,
)
from diloco_jax.launch.submit import CommandError, Submitter
from diloco_jax.planning.options import (
    Assumptions,
    parse_prices,
    price_per_hour,
    price_sentence,
    require_prices,
)
from diloco_jax.wire.certificates import complete

BACKENDS = {"tpu_vm": tpu_vm, "gke": gke, "sky": sky}

Action = Literal["create", "run", "status", "logs", "results", "stop", "delete"]
LOOKS = ("status", "logs")
"""Actions that change nothing, and ask nothing."""
OF_TPU_VM = ("create", "delete")
"""Actions of a backend that makes machines, and has no hold on what they run."""
OF_NO_STEP = frozenset({"HBM", "memory", "merge buffer", "disk bytes"})
"""Checks of the plan that do not depend on the islands' speed."""
SLOW_STEP_S = 3600.0
"""Step so long that no other check refuses."""
MARGIN_DAYS = 14
"""Days for which certificates last beyond `launch.max_hours` and `linger_hours`: nobody
renews them while a run goes on."""
WITHOUT_END_DAYS = 365
"""Days for which they last if `launch.max_hours` is 0; in the last half of them, each
`create` or `run` makes them anew."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """The options of `diloco launch`."""

    on: Backend | None = setting(
        None,
        help="Where to run: SkyPilot's managed jobs, GKE clusters, or Cloud TPU queued "
        "resources, which do not come back once they are taken away.",
    )
    init: str = setting(
        "",
        metavar="hf:gs://BUCKET/FOLDER|run:gs://BUCKET/FOLDER",
        help="Begin with the parameters of a folder of weights or of a run, in a "
        "bucket that the coordinator's machine can read. Without it they are drawn.",
    )
    action: Action = setting(
        "create",
        metavar="ACTION",
        help="create: make and start everything; what failed is made anew. stop, run: "
        "end or start the processes; the machines stay. status, logs: show how far the "
        "run is, or the processes' last lines. results: copy the run's folder to "
        "results in the workdir. delete: leave nothing but the coordinator's disk. On "
        "tpu_vm: create and delete alone.",
    )
    price: str = setting(
        "",
        metavar="GENERATION=PRICE,coordinator=PRICE",
        help="Prices per hour of a chip of each generation and of the coordinator's "
        "machine with its disk, such as v5p=4.2,v6e=2.7,coordinator=1.1; what the "
        "launch costs per hour, workers' machines included, is shown before you are "
        "asked.",
    )
    only: tuple[str, ...] = setting(
        (), help='Limit the action to these islands, or to "coordinator".'
    )
    dry_run: bool = setting(
        False, help="Write the files and print the command lines; run nothing."
    )
    yes: bool = setting(False, help="Do not ask.")
    unplanned: bool = setting(
        False,
        help="Create it even if the plan refuses it: a slice's HBM, or the "
        "coordinator's machine, disk or buffer is too small.",
    )
    disk: bool = setting(
        False, help="With delete: the coordinator's disk too, and with it the run."
    )


@dataclasses.dataclass(frozen=True)
class RehearseOptions:
    """The options of `diloco rehearse`."""

    on: Backend | None = setting(
        None,
        help="Where to rehearse, as for diloco launch. Without it, with processes of "
        "this machine.",
    )
    max_minutes: float = setting(
        60.0, POSITIVE, help="Minutes after which it ends, whatever was tried."
    )
    max_price: float = setting(
        0.0, NOT_NEGATIVE, help="Most that it may cost, by --price; 0 = any."
    )
    price: str = setting(
        "",
        metavar="GENERATION=PRICE,coordinator=PRICE",
        help="Prices per hour, as for diloco launch.",
    )
    measured: str = setting(
        "",
        metavar="FILE",
        help="Values that were measured before, as for diloco plan: the plan that is "
        "tried goes by them.",
    )
    link_gbit_per_s: float = setting(
        Assumptions.link_gbit_per_s,
        POSITIVE,
        help="Gbit/s that the plan assumes of each island's link, each way.",
    )
    share: float = setting(
        Assumptions.share[0],
        POSITIVE,
        help="Share of the chips' peak that the plan expects.",
    )
    records: str = setting(
        "",
        metavar="WORKDIR",
        help="Start nothing: read the records of a run that had --rehearse, such as "
        "one that was copied from a coordinator's disk.",
    )
    yes: bool = setting(False, help="Do not ask before machines are bought.")
    json: bool = setting(
        False, help="Print the rows to standard output as one JSON object."
    )


def run(
    config: Config, path: str, options: LaunchOptions, *, until: float = math.inf
) -> int:
    """Carry out the action of the options; return the exit code.

    until: see `Submitter`. Raises ConfigError or SecurityError before anything is run.
    """
    prices = parse_prices(options.price)
    on, action = _backend_of(options), options.action
    spec = make_spec(config, path, on, options.init)
    planned: list[str] = []
    if action == "create" and not options.unplanned:
        planned = require_planned(_begun(config, options.init))
    _check_owners(spec, options.only)
    folder = folder_of(config, path) / "launch"
    certificates = _certificates(config, path)
    if action in ("create", "run") and not options.dry_run:
        prepare_certificates(certificates, BACKENDS[on].hosts(spec), spec)
    submitter = submitter_of(config, path, options, until=until)
    deployment = submitter.deployment
    notes = planned
    if action in ("create", "run"):
        notes += [*_notes(config, spec, on), *_costs(config, prices)]
    for line in notes:
        _show(line)
    if action in ("create", "run", "results"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in deployment.files.items():
            (folder / name).write_text(text, encoding="utf-8")
            _show(f"written: {folder / name}")
    try:
        _act(submitter, options)
    except CommandError as error:
        _show(f"error: {error}")
        return 1
    if options.dry_run:
        _show("dry run: nothing was asked, so none of this says what is there")
    if on == "tpu_vm" and action == "create":
        _show("to delete all of it, the run included:")
        for line in submitter.deletions():
            _show(line)
    return 0


def _begun(config: Config, init: str) -> Config:
    """Return the config with the cycle that a run from trained weights gets."""
    if not init.startswith(("hf:", "run:")):
        return config
    run = dataclasses.replace(config.run, sync=filled(config.run.sync, LONG))
    return dataclasses.replace(config, run=run)


def folder_of(config: Config, path: str) -> Path:
    """Return the workdir of a launch on this machine."""
    name = resource_name(config.launch.name or Path(path).stem, "")
    return Path(absolute(config.placement.workdir or f"runs/{name}"))


def _certificates(config: Config, path: str) -> Path:
    own = config.placement.certificates
    return Path(absolute(own)) if own else folder_of(config, path) / "certificates"


def submitter_of(
    config: Config, path: str, options: LaunchOptions, *, until: float = math.inf
) -> Submitter:
    """Return what acts on the launch of this config. Raises ConfigError."""
    on = _backend_of(options)
    spec = make_spec(config, path, on, options.init)
    folder = folder_of(config, path) / "launch"
    deployment = BACKENDS[on].deployment(
        spec, str(_certificates(config, path)), str(folder), int(time.time())
    )
    return Submitter(
        deployment,
        only=options.only,
        show=print if options.dry_run else _show,
        confirm=asker(options.yes),
        dry_run=options.dry_run,
        until=until,
    )


def prepare_certificates(
    folder: Path, hosts: tuple[str, ...], spec: LaunchSpec
) -> None:
    """Complete the certificates of a launch. The authority's key stays here."""
    names = [one.name for one in spec.islands]
    count = len(spec.workers)
    complete(folder, hosts, *days(spec.settings), islands=names, workers=count)


def days(settings: LaunchConfig) -> tuple[int, int]:
    """Return the days for which new certificates last, and those below which an old one
    is made anew."""
    if not settings.max_hours:
        return WITHOUT_END_DAYS, WITHOUT_END_DAYS // 2
    needed = math.ceil((settings.max_hours + settings.linger_hours) / 24)
    return needed + MARGIN_DAYS, needed + MARGIN_DAYS // 2


def require_planned(config: Config) -> list[str]:
    """Ask the plan before anything is paid for: would slices and machines do?

    Steps are not known without a compiler, so a launch is refused only for what does
    not depend on them: what rests in the islands' HBM, memory, the merge buffer, and
    the least bytes of the disk. What arithmetic refuses beyond that at peak rates is
    returned as notes, and so is what would wait its turn. `diloco plan` knows the rest.

    Raises ConfigError if a slice, the coordinator's machine or its disk is too small
    for the run, however slow its steps are.
    """
    import jax

    # The laptop's devices play no part.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    from diloco_jax.planning.checks import notes, refusals
    from diloco_jax.planning.plan import fragments_of, step_seconds_of
    from diloco_jax.planning.terms import terms_of

    slow = dict.fromkeys(config.islands, SLOW_STEP_S)
    terms = dataclasses.replace(
        terms_of(config, fragments_of(config), slow), steps_known=False
    )
    wrong = [found.text for found in refusals(terms) if found.check in OF_NO_STEP]
    if wrong:
        raise ConfigError(
            f"{'; '.join(wrong)}; or `diloco launch` with --unplanned launches it all "
            f"the same"
        )
    waits = [f"plan: {note}" for note in notes(terms)]
    if config.run.model.factory:
        return waits  # Nobody knows its FLOPs before it is compiled.
    fast = {name: step_seconds_of(config, name) for name in config.islands}
    terms = dataclasses.replace(terms, step_seconds=fast, steps_known=True)
    refused = [f"plan at peak rates, REFUSED: {r.text}" for r in refusals(terms)]
    return [*refused, *waits]


def _backend_of(options: LaunchOptions) -> Backend:
    """Return where to run; raise ConfigError for options that do not go together."""
    if options.on is None:
        raise ConfigError("--on is missing; choose --on tpu_vm, --on gke or --on sky")
    if options.on == "tpu_vm" and options.action not in OF_TPU_VM:
        raise ConfigError(
            f"--action {options.action} with --on tpu_vm: it makes machines and "
            f"deletes them, and what they run is theirs; give {' or '.join(OF_TPU_VM)},"
            f" or see launch/tpu_vm/README.md for the `gcloud` lines that look at them"
        )
    if options.disk and options.action != "delete":
        raise ConfigError(
            f"--disk with --action {options.action}: it is for --action delete, which "
            f"then deletes the run too; leave it out"
        )
    if not (options.dry_run or options.action in LOOKS):
        require_answers(options.yes)
    return options.on


def require_answers(yes: bool) -> None:
    """Raise ConfigError if nobody can be asked, and nobody has said yes before."""
    if not (yes or (sys.stdin and sys.stdin.isatty())):
        raise ConfigError(
            "there is no terminal to ask on; give --yes to run the commands; "
            "`diloco launch` shows them with --dry-run"
        )


def _act(submitter: Submitter, options: LaunchOptions) -> None:
    """Carry out the action."""
    if options.action == "delete":
        submitter.delete(disk=options.disk)
    elif options.action == "status":
        _render(submitter.status())
    else:
        getattr(submitter, options.action)()


def _render(status: dict[str, Any]) -> None:
    if status:
        from diloco_jax.observability.terminal import render

        Console(stderr=True, markup=False).print(render(status, None))


def _costs(config: Config, prices: dict[str, float]) -> list[str]:
    """Return what is known of the launch's price."""
    hours = config.launch.max_hours
    limit = f"{hours:g} hours" if hours else "none"
    end = f"; at the end of the run: {config.launch.when_done}"
    if not prices:
        return [
            f"price per hour: unknown, give --price; launch.max_hours: {limit}{end}"
        ]
    require_prices(config, prices)
    per_hour = price_per_hour(config, prices)
    if hours:
        limit += f", {hours * sum(per_hour.values()):,.2f} at that price"
    return [price_sentence(per_hour), f"launch.max_hours: {limit}{end}"]


def _check_owners(spec: LaunchSpec, only: tuple[str, ...]) -> None:
    known = [COORDINATOR, *(island.name for island in spec.islands)]
    for name in only:
        if name not in known:
            raise ConfigError(
                f"--only {name}: no such part of the run{suggest(name, known)}; it has "
                f"{', '.join(known)}"
            )


def _notes(config: Config, spec: LaunchSpec, on: Backend) -> Iterator[str]:
    """Yield what to know before machines are made."""
    settings, folder = spec.settings, config.placement.checkpoints
    for field, shows in (("image", "push"), ("cloud_image", "pull")):
        image = getattr(settings, field)
        if "@sha256:" not in image:
            yield (
                f"note: launch.{field} = {image!r} is a name that may come to mean "
                f"another image while the run goes on; write its digest, "
                f"REGISTRY/PATH@sha256:..., which `docker {shows}` has shown"
            )
    outside = settings.coordinator_address
    if on == "gke" and outside and all(i.cluster == spec.cluster for i in spec.islands):
        yield (
            f"note: launch.coordinator_address = {outside!r} is for islands in other "
            f"clusters, and all are in the coordinator's, where perhaps nobody knows "
            f"that name: leave it out (--launch.coordinator-address=)"
        )
    for island in spec.islands:
        known = island.slice.generation.zones
        if unknown := [zone for zone in island.zones if zone not in known]:
            yield (
                f"note: launch.zones.{island.name} has {', '.join(unknown)}, and "
                f"{island.offered}, unless your project has it there"
            )
    if folder and not is_bucket(folder):
        # The coordinator's disk, which outlives its machine, is at WORKDIR.
        gone = "islands' checkpoints are gone with their machines"
        if not Path(folder).is_relative_to(WORKDIR):
            gone = "snapshots and checkpoints are gone with the container"
        yield (
            f"note: placement.checkpoints = {folder!r} is a folder in each container: "
            f"{gone}, and hosts of an island do not share it; set gs://BUCKET/FOLDER, "
            f"or leave it out: snapshots are then on the coordinator's disk"
        )
    islands, coordinator = settings.service_account, settings.coordinator_account
    if on == "sky":
        yield (
            f"note: SkyPilot's machines act as {sky.account(spec)}, islands and the "
            f"coordinator alike, whatever launch.service_account says: whoever takes "
            f"over one of them may change or delete machines, slices and buckets of "
            f"the project; --on tpu_vm and --on gke have accounts of your own"
        )
    elif not islands:
        yield (
            "note: launch.service_account is empty: machines act as the project's "
            "default account, which may often change or delete anything in it; make "
            "accounts of their own (docs/gke.md, Accounts of your own)"
        )
    if on != "sky" and coordinator in ("", islands):
        yield (
            f"note: islands and the coordinator act as one account "
            f"(launch.coordinator_account = {coordinator!r}): whoever takes over an "
            f"island's machine may do what the coordinator's may; set another one"
        )
    if on == "tpu_vm":
        yield (
            "note: a slice that is preempted does not come back on tpu_vm: delete it "
            "(--action delete --only ISLAND) and launch again; --on sky and --on gke "
            "buy it again"
        )


def asker(yes: bool) -> Callable[[str], bool]:
    """Return what asks on the terminal, or says yes to everything."""

    def ask(question: str) -> bool:
        if yes:
            return True
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    return ask


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
