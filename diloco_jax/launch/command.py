"""`diloco launch CONFIG --on tpu_vm|gke|sky`: from the config to running machines."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from diloco_jax.config import Config, ConfigError, suggest
from diloco_jax.config.fields import setting
from diloco_jax.files import absolute, is_bucket
from diloco_jax.launch import gke, orphans, sky, tpu_vm
from diloco_jax.launch.calls import CommandError
from diloco_jax.launch.certificates import (
    Unrenewed,
    keep_renewed,
    prepare_certificates,
)
from diloco_jax.launch.order import COORDINATOR, Order, make_order
from diloco_jax.launch.placing import Backend
from diloco_jax.launch.record import LaunchRecord
from diloco_jax.launch.resources import Deployment
from diloco_jax.launch.submit import Submitter
from diloco_jax.launch.variables import flag_notes
from diloco_jax.launch.watch import LaunchWatch
from diloco_jax.observability.alarm import WITHIN_S, Alarm
from diloco_jax.planning import price

BACKENDS = {"tpu_vm": tpu_vm, "gke": gke, "sky": sky}


Action = Literal[
    "create", "run", "status", "logs", "results", "watch", "stop", "delete", "list"
]
LOOKS = ("status", "logs", "list")
"""Actions that change nothing, and ask nothing."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """The options of `diloco launch`."""

    on: Literal["tpu_vm", "gke", "sky"] | None = setting(
        None,
        help="Where to run: Cloud TPU queued resources, GKE clusters, or SkyPilot's "
        "managed jobs.",
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
        help="create: make and start everything; what was preempted or failed is made "
        "anew. stop, run: end or start the processes; the machines stay. status, logs: "
        "show how far the run is, or the processes' last lines. results: copy the "
        "run's folder to results in the workdir. watch: make anew what is preempted "
        "and certificates that end soon, and delete everything but the coordinator's "
        "disk once the run is over. delete: leave nothing but that disk. list: show "
        "everything that any launch of the project has left in the cloud.",
    )
    price: str = setting(
        "",
        metavar="GENERATION=PRICE,coordinator=PRICE",
        help="Prices per hour of a chip of each generation and of the coordinator's "
        "machine with its disk, such as v5p=4.2,v6e=2.7,coordinator=1.1; what the "
        "launch costs per hour, workers' machines included, is shown "
        "before you are asked, and by list.",
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
        help="Create it even if the coordinator's machine is too small by the plan.",
    )
    disk: bool = setting(
        False, help="With delete: the coordinator's disk too, and with it the run."
    )


def run(config: Config, path: str, options: LaunchOptions) -> int:
    """Carry out the action of the options; return the exit code.

    Raises ConfigError or SecurityError before anything is run.
    """
    prices = price.parse_prices(options.price)
    if options.action == "list":
        return _list(config, options, prices)
    on = _backend_of(options)
    order = make_order(config, path, on, options.init)
    planned: list[str] = []
    if options.action == "create" and not options.unplanned:
        from diloco_jax.launch.planned import require_planned

        planned = require_planned(config)
    _check_owners(order, options.only)
    workdir = Path(absolute(config.placement.workdir or f"runs/{order.name}"))
    record = LaunchRecord(workdir / "launch.json", on)
    folder, certificates = workdir / "launch", _certificates(config, workdir)
    if options.action in ("create", "run") and not options.dry_run:
        prepare_certificates(
            certificates,
            BACKENDS[on].hosts(order),
            tuple(island.name for island in order.islands),
            len(order.workers),
        )
    if options.action == "watch":
        order = dataclasses.replace(order, ends_unix=order.end_unix(int(time.time())))

    def render() -> Deployment:
        now = int(time.time())
        made: Deployment = BACKENDS[on].deployment(
            order, str(certificates), str(folder), now
        )
        return made

    def renew() -> Deployment:
        made = render()
        _write(made, folder)
        return made

    def certify() -> Unrenewed | None:
        return keep_renewed(certificates, tuple(order.secrets))

    deployment = render()
    for line in (*_zone_remarks(order), *planned):
        _show(line)
    if options.action in ("create", "run"):
        _show_notes(config, order, on, prices)
    if options.action in ("create", "run", "results"):
        for name in _write(deployment, folder):
            _show(f"written: {folder / name}")
    submitter = Submitter(
        deployment,
        record,
        only=options.only,
        show=print if options.dry_run else _show,
        confirm=_asker(options.yes),
        dry_run=options.dry_run,
    )
    try:
        if options.action == "watch":
            _watch(config, order, submitter, renew, certify, options)
        else:
            _act(submitter, options)
    except CommandError as error:
        _show(f"error: {error}")
        return 1
    return 0


def _backend_of(options: LaunchOptions) -> Backend:
    """Return where to run; raise ConfigError for options that do not go together."""
    if options.on is None:
        raise ConfigError("--on is missing; choose --on tpu_vm, --on gke or --on sky")
    if options.disk and options.action != "delete":
        raise ConfigError(
            f"--disk with --action {options.action}: it is for --action delete, which "
            f"then deletes the run too; leave it out"
        )
    quiet = options.dry_run or options.yes or options.action in LOOKS
    if not (quiet or sys.stdin.isatty()):
        raise ConfigError(
            "there is no terminal to ask on; give --yes to run the commands, or "
            "--dry-run to see them"
        )
    return options.on


def _certificates(config: Config, workdir: Path) -> Path:
    own = config.placement.certificates
    return Path(absolute(own)) if own else workdir / "certificates"


def _show_notes(
    config: Config, order: Order, on: Backend, prices: dict[str, float]
) -> None:
    """Show what to know before machines are made, and what they cost."""
    if prices:
        price.require_prices(config, prices)
    notes = (
        *flag_notes(config),
        *_image_notes(order),
        *_data_notes(order),
        *_source_notes(order),
        *_account_notes(order, on),
    )
    for line in (*notes, *_costs(config, prices)):
        _show(line)


def _act(submitter: Submitter, options: LaunchOptions) -> None:
    """Carry out an action that ends by itself."""
    match options.action:
        case "create":
            submitter.create()
        case "run":
            submitter.run()
        case "status":
            _render(submitter.status())
        case "logs":
            submitter.logs()
        case "results":
            submitter.results()
        case "stop":
            submitter.stop()
        case "delete":
            submitter.delete(disk=options.disk)


def _watch(
    config: Config,
    order: Order,
    submitter: Submitter,
    renew: Callable[[], Deployment],
    certify: Callable[[], Unrenewed | None],
    options: LaunchOptions,
) -> None:
    """Make anew what is preempted, until the run is over."""
    alarm = Alarm(config.placement, order.name, tuple)
    show = print if options.dry_run else _show
    watch = LaunchWatch(submitter, renew, certify, show, alarm.raised)
    alarm.start()
    try:
        watch.run(order.ends_unix or math.inf)
    finally:
        alarm.close(WITHIN_S)


def _write(deployment: Deployment, folder: Path) -> list[str]:
    """Write the deployment's files; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in deployment.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(deployment.files)


def _list(config: Config, options: LaunchOptions, prices: dict[str, float]) -> int:
    if not config.launch.project:
        raise ConfigError("launch.project must be set for --action list")
    try:
        found = orphans.find(config.launch.project, _show, dry_run=options.dry_run)
    except CommandError as error:
        _show(f"error: {error}")
        return 1
    for line in orphans.listed(found, prices):
        print(line)
    return 0


def _render(status: dict[str, Any]) -> None:
    if status:
        from rich.console import Console

        from diloco_jax.observability.terminal import render

        Console(stderr=True, markup=False).print(render(status, None))


def _costs(config: Config, prices: dict[str, float]) -> list[str]:
    """Return what is known of the launch's price per hour."""
    limit = f"{config.launch.max_hours:g} hours" if config.launch.max_hours else "none"
    end = f"launch.max_hours: {limit}; at the end of the run: {config.launch.when_done}"
    if prices:
        return [price.sentence(price.price_per_hour(config, prices)), end]
    return [f"price per hour: unknown, give --price; {end}"]


def _check_owners(order: Order, only: tuple[str, ...]) -> None:
    known = [COORDINATOR, *(island.name for island in order.islands)]
    for name in only:
        if name not in known:
            raise ConfigError(
                f"--only {name}: no such part of the run{suggest(name, known)}; it has "
                f"{', '.join(known)}"
            )


def _image_notes(order: Order) -> list[str]:
    shows = {"image": "push", "cloud_image": "pull"}
    images = {field: getattr(order.settings, field) for field in shows}
    return [
        f"note: launch.{field} = {image!r} is a name that may come to mean another "
        f"image while the run goes on; write its digest, REGISTRY/PATH@sha256:..., "
        f"which `docker {shows[field]}` has shown"
        for field, image in images.items()
        if "@sha256:" not in image
    ]


def _source_notes(order: Order) -> list[str]:
    if not is_bucket(order.source.partition(":")[2]):
        return []
    return [
        f"note: the weights of --init {order.source} are not read here, so what they "
        f"need of the coordinator's machine was judged by run.model of the config"
    ]


def _account_notes(order: Order, on: Backend) -> list[str]:
    if on == "sky":
        return [
            f"note: SkyPilot's machines act as {sky.account(order)}, islands and the "
            f"coordinator alike, whatever launch.service_account says: whoever takes "
            f"over one of them may change or delete machines, slices and buckets of "
            f"the project; --on tpu_vm and --on gke have accounts of your own"
        ]
    settings = order.settings
    islands, coordinator = settings.service_account, settings.coordinator_account
    notes = []
    if not islands:
        notes.append(
            "note: launch.service_account is empty: machines act as the project's "
            "default account, which may often change or delete anything in it; make "
            "accounts of their own (docs/tpu.md, The project)"
        )
    if coordinator in ("", islands):
        notes.append(
            f"note: islands and the coordinator act as one account "
            f"(launch.coordinator_account = {coordinator!r}): whoever takes over an "
            f"island's machine may do what the coordinator's may; set another one"
        )
    return notes


def _zone_remarks(order: Order) -> list[str]:
    return [
        f"note: {zone} is not among the zones known to offer "
        f"{island.slice.generation.name}: {', '.join(island.slice.generation.zones)}"
        for island in order.islands
        for zone in island.zones
        if zone not in island.slice.generation.zones
    ]


def _data_notes(order: Order) -> list[str]:
    data = order.settings.data
    if not data:
        return []
    return [
        f"note: every machine copies {data}, and reads large files that have no "
        f"manifests beside them; make those once: `diloco manifest FOLDER`, then "
        f"`gcloud storage rsync --recursive FOLDER {data}`"
    ]


def _asker(yes: bool) -> Callable[[str], bool]:
    def ask(question: str) -> bool:
        if yes:
            return True
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    return ask


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
