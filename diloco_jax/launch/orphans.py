"""Find by its labels everything that launches have left in a project, and price it.

`launch.json` may be lost; the labels are not.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diloco_jax.hardware.slices import GENERATIONS
from diloco_jax.launch.calls import call
from diloco_jax.launch.resources import PART_LABEL, RUN_LABEL, Command

KINDS = {
    "slice": ("compute", "tpus", "queued-resources", "list", "--zone=-"),
    "TPU VM": ("compute", "tpus", "tpu-vm", "list", "--zone=-"),
    "machine": ("compute", "instances", "list"),
    "disk": ("compute", "disks", "list"),
    "secret": ("secrets", "list"),
    "firewall rule": ("compute", "firewall-rules", "list"),
}
"""Commands that list what may have our labels. Nodes of GKE are machines."""
DESCRIBED = ("firewall rule",)
"""Kinds that have no labels: they are in the description."""
UNFILTERED = ("slice",)
"""Kinds whose labels lie where no filter of `gcloud` looks."""
COORDINATOR = "coordinator"


class Orphan(NamedTuple):
    """One thing with our labels."""

    kind: str
    name: str
    run: str
    part: str
    zone: str
    state: str
    type: str
    """Machine or accelerator type; empty if there is none."""


def find(
    project: str, show: Callable[[str], None], *, dry_run: bool = False
) -> list[Orphan]:
    """Ask the cloud for everything with the label of a run. Raises CommandError."""
    found = []
    for kind, words in KINDS.items():
        ours = [] if kind in UNFILTERED else [f"--filter=labels.{RUN_LABEL}:*"]
        if kind in DESCRIBED:
            ours = [f"--filter=description~^{RUN_LABEL}"]
        line = ("gcloud", *words, *ours, "--format=json", f"--project={project}")
        command = Command((*line, "--quiet"))
        show(shlex.join(command.arguments))
        if not dry_run:
            found += [_orphan(kind, entry) for entry in json.loads(call(command))]
    return [orphan for orphan in found if orphan.run]


def listed(found: list[Orphan], prices: Mapping[str, float]) -> list[str]:
    """Return a line for each, by run, and one with what all of them cost per hour.

    prices: per chip by generation, and per machine for "coordinator".
    """
    lines, total, unknown = [], 0.0, 0
    for orphan in sorted(found, key=lambda o: (o.run, o.part, o.kind, o.name)):
        costs = _price(orphan, prices)
        cost = ""
        if costs is None:
            unknown += 1
            cost = ", price unknown"
        elif costs:
            total += costs
            cost = f", {costs:,.2f} per hour"
        where = f" in {orphan.zone}" if orphan.zone else ""
        lines.append(
            f"{orphan.run} {orphan.part}: {orphan.kind} {orphan.name}{where} "
            f"{orphan.type} {orphan.state}".rstrip()
            + cost
        )
    lacking = f", and {unknown} without a price (--price)" if unknown else ""
    return [*lines, f"{len(found)} found: {total:,.2f} per hour{lacking}"]


def _orphan(kind: str, entry: Mapping[str, Any]) -> Orphan:
    labels = entry.get("labels") or {}
    if kind == "slice":
        nodes = entry.get("tpu", {}).get("nodeSpec", [])
        labels = labels or (nodes[0].get("node", {}).get("labels") if nodes else {})
    if kind in DESCRIBED:
        pairs = str(entry.get("description", "")).split(",")
        labels = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    state = entry.get("state", entry.get("status", ""))
    path = str(entry.get("name", "")).split("/")
    zone = str(entry.get("zone", "")).rpartition("/")[2]
    if not zone and "locations" in path:
        zone = path[path.index("locations") + 1]
    kinds = entry.get("acceleratorType", entry.get("machineType", ""))
    return Orphan(
        kind=kind,
        name=path[-1],
        run=labels.get(RUN_LABEL, ""),
        part=labels.get(PART_LABEL, "?"),
        zone=zone,
        state=str(state.get("state", "") if isinstance(state, dict) else state),
        type=str(kinds).rpartition("/")[2],
    )


def _price(orphan: Orphan, prices: Mapping[str, float]) -> float | None:
    """Return the price per hour: 0 for what has none of its own, or does not run; None
    if it is unknown. A queued resource's price is that of its machines."""
    if orphan.kind not in ("TPU VM", "machine"):
        return 0.0
    if orphan.state in ("TERMINATED", "STOPPED", "PREEMPTED", "SUSPENDED"):
        return 0.0
    for generation in GENERATIONS.values():
        price = prices.get(generation.name)
        for chips, machine in generation.machine_types.items():
            if orphan.type == machine:
                return None if price is None else chips * price
        name, _, count = orphan.type.partition("-")
        if name == generation.name and count.isdecimal():
            chips = int(count) // generation.counted_per_chip
            return None if price is None else chips * price
    return prices.get(COORDINATOR)
