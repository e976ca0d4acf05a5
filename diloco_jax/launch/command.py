"""`diloco launch CONFIG --on tpu_vm|gke`: from the config to running machines."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from diloco_jax.config import Config, ConfigError, suggest
from diloco_jax.config.fields import setting
from diloco_jax.launch import gke, tpu_vm
from diloco_jax.launch.calls import CommandError
from diloco_jax.launch.certificates import prepare_certificates
from diloco_jax.launch.order import COORDINATOR, Order, make_order
from diloco_jax.launch.record import LaunchRecord
from diloco_jax.launch.submit import Submitter
from diloco_jax.launch.variables import flag_notes
from diloco_jax.paths import absolute

BACKENDS = {"tpu_vm": tpu_vm, "gke": gke}


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """The options of `diloco launch`."""

    on: Literal["tpu_vm", "gke"] | None = setting(
        None, help="Where to run: Cloud TPU queued resources, or a GKE cluster."
    )
    init: str = setting(
        "",
        metavar="hf:gs://BUCKET/FOLDER|run:gs://BUCKET/FOLDER",
        help="Begin with the parameters of a folder of weights or of a run, in a "
        "bucket that the coordinator's machine can read. Without it they are drawn.",
    )
    action: Literal["create", "run", "logs", "stop", "delete"] = setting(
        "create",
        help="create: make and start everything; what was preempted or failed is made "
        "anew. stop, run: end or start the processes; the machines stay. logs: show "
        "the processes' last lines. delete: leave nothing but the coordinator's disk.",
    )
    only: tuple[str, ...] = setting(
        (), help='Limit the action to these islands, or to "coordinator".'
    )
    dry_run: bool = setting(
        False, help="Write the files and print the command lines; run nothing."
    )
    yes: bool = setting(False, help="Do not ask.")
    disk: bool = setting(
        False, help="With delete: the coordinator's disk too, and with it the run."
    )


def run(config: Config, path: str, options: LaunchOptions) -> int:
    """Carry out the action of the options; return the exit code.

    Raises ConfigError or SecurityError before anything is run.
    """
    if options.on is None:
        raise ConfigError("--on is missing; choose --on tpu_vm or --on gke")
    if options.disk and options.action != "delete":
        raise ConfigError(
            f"--disk with --action {options.action}: it is for --action delete, which "
            f"then deletes the run too; leave it out"
        )
    if not (options.dry_run or options.yes or sys.stdin.isatty()):
        raise ConfigError(
            "there is no terminal to ask on; give --yes to run the commands, or "
            "--dry-run to see them"
        )
    order = make_order(config, path, options.on, options.init)
    _check_owners(order, options.only)
    workdir = Path(absolute(config.placement.workdir or f"runs/{order.name}"))
    record = LaunchRecord(workdir / "launch.json", options.on)
    own = config.placement.certificates
    certificates = Path(absolute(own)) if own else workdir / "certificates"
    folder = workdir / "launch"
    backend = BACKENDS[options.on]
    if options.action in ("create", "run") and not options.dry_run:
        prepare_certificates(
            certificates,
            backend.hosts(order),
            tuple(island.name for island in order.islands),
        )
    deployment = backend.deployment(
        order, str(certificates), str(folder), int(time.time())
    )
    for line in _remarks(order):
        _show(line)
    if options.action in ("create", "run"):
        for line in (*flag_notes(config), *_data_notes(order)):
            _show(line)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in deployment.files.items():
            (folder / name).write_text(text, encoding="utf-8")
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
        match options.action:
            case "create":
                submitter.create()
            case "run":
                submitter.run()
            case "logs":
                submitter.logs()
            case "stop":
                submitter.stop()
            case "delete":
                submitter.delete(disk=options.disk)
    except CommandError as error:
        _show(f"error: {error}")
        return 1
    return 0


def _check_owners(order: Order, only: tuple[str, ...]) -> None:
    known = [COORDINATOR, *(island.name for island in order.islands)]
    for name in only:
        if name not in known:
            raise ConfigError(
                f"--only {name}: no such part of the run{suggest(name, known)}; it has "
                f"{', '.join(known)}"
            )


def _remarks(order: Order) -> list[str]:
    return [
        f"note: {island.zone} is not among the zones known to offer "
        f"{island.slice.generation.name}: {', '.join(island.slice.generation.zones)}"
        for island in order.islands
        if island.zone not in island.slice.generation.zones
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
