"""A `gcloud` that knows the commands which `diloco launch` uses, and nothing else.

Flags are those of the published reference: others, missing ones and ones that exclude
each other are refused as the real command refuses them. What is made is kept in a
folder, FAKE_CLOUD: `things.json` by kind and name, `calls.jsonl` every command line,
`failures.json` what shall fail and how, by command.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

WIDE = {"--project", "--format"}
"""Flags with a value that every command takes."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """One command. `values`: its flags with a value, with "!" those that must be given;
    `either`: of each, exactly one must be; `pairs`: flags that need another one;
    `exclusive`: at most one."""

    kind: str
    verb: str
    values: str = ""
    switches: str = ""
    either: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    exclusive: tuple[str, ...] = ()


SSH = (
    "--batch-size --ssh-flag --ssh-key-file --strict-host-key-checking "
    "--output-directory --ssh-key-expiration --ssh-key-expire-after --zone!"
)
SSH_SWITCHES = (
    "--dry-run --force-key-file-overwrite --plain --internal-ip --tunnel-through-iap"
)
BIND = "--member! --role! --condition"
POOL = "--cluster! --location!"
TPUS = "compute tpus queued-resources"

COMMANDS = {
    f"{TPUS} create": Spec(
        "queued resource",
        "create",
        "--zone! --runtime-version! --accelerator-type --topology --type --node-id "
        "--node-count --node-prefix --boot-disk --data-disk --description --labels "
        "--metadata --metadata-from-file --network --range --scopes --service-account "
        "--subnetwork --tags --valid-after-duration --valid-after-time "
        "--valid-until-duration --valid-until-time --reservation-host-folder "
        "--reservation-host-organization --reservation-host-project",
        "--async --guaranteed --internal-ips --reserved --shielded-secure-boot --spot",
        either=("--accelerator-type --type", "--node-id --node-count"),
        pairs=(("--type", "--topology"), ("--topology", "--type")),
        exclusive=("--spot --reserved --guaranteed",),
    ),
    f"{TPUS} describe": Spec("queued resource", "describe", "--zone!"),
    f"{TPUS} delete": Spec("queued resource", "delete", "--zone!", "--async --force"),
    f"{TPUS} ssh": Spec(
        "queued resource", "ssh", f"{SSH} --command! --node --worker", SSH_SWITCHES
    ),
    "compute instances create": Spec(
        "instance",
        "create",
        "--zone! --machine-type --image --image-family --image-project --labels "
        "--boot-disk-size --boot-disk-type --create-disk --disk --network --subnet "
        "--address --tags --metadata --metadata-from-file --scopes --service-account",
        "--async --no-address --no-scopes --no-service-account --preemptible",
        exclusive=("--address --no-address", "--image --image-family"),
    ),
    "compute instances describe": Spec("instance", "describe", "--zone!"),
    "compute instances delete": Spec(
        "instance", "delete", "--zone! --delete-disks --keep-disks"
    ),
    "compute ssh": Spec(
        "instance", "ssh", f"{SSH} --command", f"{SSH_SWITCHES} --troubleshoot"
    ),
    "compute scp": Spec("instance", "copy", "--zone", "--recurse --tunnel-through-iap"),
    "compute disks create": Spec("disk", "create", "--zone! --size --type --labels"),
    "compute disks describe": Spec("disk", "describe", "--zone!"),
    "compute disks delete": Spec("disk", "delete", "--zone!"),
    "compute firewall-rules create": Spec(
        "firewall rule",
        "create",
        "--action --allow --rules --direction --network --priority --source-ranges "
        "--source-tags --target-tags --description",
        either=("--allow --action",),
        pairs=(("--action", "--rules"), ("--rules", "--action")),
    ),
    "compute firewall-rules describe": Spec("firewall rule", "describe"),
    "compute firewall-rules delete": Spec("firewall rule", "delete"),
    "compute addresses create": Spec(
        "address", "create", "--region! --subnet --addresses --purpose"
    ),
    "secrets create": Spec(
        "secret",
        "create",
        "--data-file --labels --location --locations --replication-policy --ttl",
    ),
    "secrets add-iam-policy-binding": Spec("secret", "bind", f"{BIND} --location"),
    "secrets versions add": Spec("secret", "version", "--data-file"),
    "secrets update": Spec("secret", "label", "--update-labels"),
    "secrets describe": Spec("secret", "describe", "--location"),
    "secrets delete": Spec("secret", "delete", "--etag --location"),
    "container clusters get-credentials": Spec(
        "cluster",
        "login",
        "--location --region --zone",
        "--internal-ip --dns-endpoint",
        either=("--location --region --zone",),
    ),
    "container clusters create": Spec(
        "cluster",
        "create",
        "--location! --node-locations --num-nodes --machine-type --release-channel "
        "--workload-pool --network --subnetwork",
        "--enable-ip-alias --enable-dataplane-v2",
    ),
    "container node-pools create": Spec(
        "node pool",
        "create",
        f"{POOL} --machine-type --node-locations --num-nodes --tpu-topology "
        "--min-nodes --max-nodes --total-min-nodes --total-max-nodes --disk-size "
        "--location-policy --reservation --reservation-affinity --placement-type "
        "--service-account --scopes --node-labels --max-run-duration --labels "
        "--node-taints --workload-metadata",
        "--async --spot --preemptible --enable-autoscaling --enable-gvnic --flex-start",
        pairs=(("--reservation", "--reservation-affinity"),),
    ),
    "container node-pools describe": Spec("node pool", "describe", POOL),
    "container node-pools delete": Spec("node pool", "delete", POOL, "--async"),
    "dns record-sets describe": Spec("record", "describe", "--zone! --type!"),
    "dns record-sets create": Spec(
        "record", "create", "--zone! --type! --ttl --rrdatas"
    ),
    "dns record-sets update": Spec(
        "record", "version", "--zone! --type! --ttl --rrdatas"
    ),
    "dns managed-zones create": Spec(
        "DNS zone", "create", "--dns-name! --visibility --networks --description!"
    ),
    "iam service-accounts add-iam-policy-binding": Spec("account", "bind", BIND),
    "iam service-accounts create": Spec(
        "account", "create", "--description --display-name"
    ),
    "iam roles create": Spec(
        "role", "create", "--permissions --title --description --stage --file"
    ),
    "services enable": Spec("service", "enable", switches="--async"),
    "artifacts repositories create": Spec(
        "repository", "create", "--location! --repository-format! --description"
    ),
    "projects add-iam-policy-binding": Spec("project", "bind", BIND),
    "auth configure-docker": Spec("registry", "login"),
    "storage buckets add-iam-policy-binding": Spec("bucket", "bind", BIND),
    "storage rsync": Spec("bucket", "copy", switches="--recursive"),
}
TAGS = ("--tags", "--source-tags", "--target-tags")
TAG = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
FRESH = {
    "queued resource": "WAITING_FOR_RESOURCES",
    "instance": "RUNNING",
    "disk": "READY",
    "node pool": "RUNNING",
}


class UsageError(Exception):
    """Bad usage: exit code 2."""


def main(arguments: list[str]) -> int:
    """Runs one command line."""
    folder = Path(os.environ["FAKE_CLOUD"])
    with (folder / "calls.jsonl").open("a") as calls:
        print(json.dumps(["gcloud", *arguments]), file=calls)
    try:
        name, spec, names, flags = parse(arguments)
    except UsageError as refused:
        print(f"ERROR: (gcloud) {refused}", file=sys.stderr)
        return 2
    failures = json.loads((folder / "failures.json").read_text())
    named = f"{name} {names[0]}" if names else name
    if found := failures.get(name) or failures.get(named):
        code, text = found
        print(text, file=sys.stderr)
        return code
    return act(folder / "things.json", name, spec, names, flags)


def parse(arguments: list[str]) -> tuple[str, Spec, list[str], dict[str, str]]:
    """The command, its names and flags; raises UsageError."""
    words = list(arguments)
    name = ""
    while words and not words[0].startswith("-") and name not in COMMANDS:
        name = f"{name} {words.pop(0)}".strip()
    if name not in COMMANDS:
        raise UsageError(f"Invalid choice: {name!r}")
    spec = COMMANDS[name]
    values = {*spec.values.replace("!", "").split(), *WIDE}
    switches = {*spec.switches.split(), "--quiet"}
    names, flags = [], {}
    while words:
        word = words.pop(0)
        flag, given, value = word.partition("=")
        if not word.startswith("--"):
            names.append(word)
        elif flag in switches and not given:
            flags[flag] = ""
        elif flag in values:
            if not given and not words:
                raise UsageError(f"argument {flag}: expected one argument")
            flags[flag] = value if given else words.pop(0)
        else:
            raise UsageError(f"unrecognized arguments: {word}")
    if not names:
        raise UsageError("argument NAME: Must be specified.")
    must = [v.rstrip("!") for v in spec.values.split() if v.endswith("!")]
    for group in (*must, *spec.either):
        given = [flag for flag in group.split() if flag in flags]
        if len(given) != 1:
            raise UsageError(f"argument {group}: Exactly one must be specified.")
    for group in spec.exclusive:
        if len([flag for flag in group.split() if flag in flags]) > 1:
            raise UsageError(f"At most one of {group} can be specified.")
    for flag, needed in spec.pairs:
        if flag in flags and needed not in flags:
            raise UsageError(f"argument {flag}: {needed} must be specified.")
    for flag in ("--data-file", "--metadata-from-file"):
        path = flags.get(flag, "").rpartition("=")[2]
        if path and not Path(path).is_file():
            raise UsageError(f"argument {flag}: Unable to read file [{path}]")
    return name, spec, names, flags


def act(
    path: Path, command: str, spec: Spec, names: list[str], flags: dict[str, str]
) -> int:
    """Changes or shows what there is."""
    things = json.loads(path.read_text())
    name, kind = names[0], things.setdefault(spec.kind, {})
    there = ("describe", "delete", "ssh", "version", "label")
    if spec.verb in there and name not in kind:
        print(f"ERROR: ({command}) NOT_FOUND: {name} was not found", file=sys.stderr)
        return 1
    if spec.verb == "create":
        tags = [t for flag in TAGS for t in flags.get(flag, "").split(",")]
        if wrong := [tag for tag in tags if tag and not TAG.fullmatch(tag)]:
            print(f"ERROR: ({command}) Invalid value: {wrong}", file=sys.stderr)
            return 1
        if name in kind:
            print(f"ERROR: ({command}) ALREADY_EXISTS: {name}", file=sys.stderr)
            return 1
        disk = re.search(r"name=([^,]+)", flags.get("--disk", ""))
        if disk and disk[1] not in things.get("disk", {}):
            print(f"ERROR: disk {disk[1]} was not found", file=sys.stderr)
            return 1
        kind[name] = {"state": FRESH.get(spec.kind, name), **flags}
    elif spec.verb == "describe":
        label = re.fullmatch(r"value\(name,labels\.(.+)\)", flags["--format"])
        pairs = [p.split("=") for p in kind[name].get("--labels", "").split(",") if p]
        kept = f"{name} {dict(pairs).get(label[1], '')}" if label else ""
        print(kept or kind[name]["state"])
    elif spec.verb == "label":
        kind[name]["--labels"] += f",{flags['--update-labels']}"
    elif spec.verb == "bind" and spec.kind == "secret":
        kind[name].setdefault("readers", []).append(flags["--member"])
    elif spec.verb == "version":
        kind[name]["versions"] = kind[name].get("versions", 1) + 1
    elif spec.verb == "delete":
        del kind[name]
    elif spec.verb == "ssh":
        print(f"{name}: {flags['--command']}")
    path.write_text(json.dumps(things))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
