"""A cloud that is not there: `gcloud`, `kubectl` and `sky` as far as launches use
them, and what they were told.

Flags are those of the published references that launches and pages use: others, missing
ones and ones that exclude each other are refused as the real commands refuse them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml


class RefusedError(Exception):
    """A command failed: its exit code, and what it says."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


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


BIND = "--member! --role! --condition"
POOL = "--cluster! --location!"
TPUS = "compute tpus queued-resources"
REACHED = "--dry-run --tunnel-through-iap"
PLACES = "--location --region --zone"

GCLOUD = {
    f"{TPUS} create": Spec(
        "queued resource",
        "create",
        "--zone! --runtime-version! --accelerator-type --topology --type --node-id! "
        "--description --labels --metadata-from-file --network --scopes "
        "--service-account --subnetwork --tags --valid-until-duration",
        "--async --internal-ips --reserved --spot",
        either=("--accelerator-type --type",),
        pairs=(("--type", "--topology"), ("--topology", "--type")),
        exclusive=("--spot --reserved",),
    ),
    f"{TPUS} describe": Spec("queued resource", "describe", "--zone!"),
    f"{TPUS} delete": Spec("queued resource", "delete", "--zone!", "--async --force"),
    f"{TPUS} ssh": Spec(
        "queued resource", "ssh", "--zone! --command! --node --worker", REACHED
    ),
    "compute instances create": Spec(
        "instance",
        "create",
        "--zone! --machine-type --image-family --image-project --labels "
        "--boot-disk-size --disk --network --subnet --tags --metadata-from-file "
        "--scopes --service-account",
        "--async --no-address",
    ),
    "compute instances describe": Spec("instance", "describe", "--zone!"),
    "compute instances delete": Spec("instance", "delete", "--zone!"),
    "compute ssh": Spec("instance", "ssh", "--zone! --command", REACHED),
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
        "address", "create", "--region! --subnet --addresses"
    ),
    "secrets create": Spec(
        "secret", "create", "--data-file --labels --replication-policy"
    ),
    "secrets add-iam-policy-binding": Spec("secret", "bind", BIND),
    "secrets versions add": Spec("secret", "version", "--data-file"),
    "secrets update": Spec("secret", "label", "--update-labels"),
    "secrets describe": Spec("secret", "describe"),
    "secrets delete": Spec("secret", "delete"),
    "container clusters get-credentials": Spec(
        "cluster", "login", PLACES, either=(PLACES,)
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
        "--min-nodes --max-nodes --reservation --reservation-affinity --labels "
        "--service-account --scopes --node-labels --node-taints --workload-metadata "
        "--placement-policy",
        "--async --spot --enable-autoscaling",
        pairs=(("--reservation", "--reservation-affinity"),),
        exclusive=("--tpu-topology --placement-policy",),
    ),
    "compute resource-policies create workload-policy": Spec(
        "workload policy", "create", "--region! --type! --accelerator-topology"
    ),
    "compute resource-policies describe": Spec(
        "workload policy", "describe", "--region!"
    ),
    "compute resource-policies delete": Spec("workload policy", "delete", "--region!"),
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
    "workload policy": "READY",
}
KUBECTL = {
    "get": (("-o",), ("--ignore-not-found",)),
    "apply": (("-f",), ("--server-side",)),
    "create": (("--from-file",), ()),
    "label": ((), ()),
    "delete": ((), ("--ignore-not-found",)),
    "wait": (("--for", "--timeout"), ()),
    "logs": (
        ("--selector", "--container", "--tail", "--max-log-requests"),
        ("--prefix",),
    ),
    "cp": (("--container",), ()),
    "exec": (("--container",), ()),
}
"""Flags with a value, and others, by verb."""
KINDS = {
    *("configmap", "secret", "namespace", "service", "job", "jobset", "pod"),
    *("persistentvolumeclaim", "poddisruptionbudget", "networkpolicy"),
    "serviceaccount",
}
SKY = {
    "launch": (("--name", "--env", "--config"), ("--yes", "--detach-run")),
    "queue": (("--output",), ("--all",)),
    "cancel": (("--name",), ("--yes",)),
    "logs": (("--name",), ("--no-follow",)),
}
"""The same, of `sky jobs` of SkyPilot 0.14."""
ENDED = ("SUCCEEDED", "CANCELLED", "FAILED")


def _flags(
    words: Sequence[str], values: Collection[str], switches: Collection[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return names, and what each flag was given. Raises RefusedError."""
    left, names = list(words), list[str]()
    flags: dict[str, list[str]] = {}
    while left:
        word = left.pop(0)
        flag, given, value = word.partition("=")
        if word == "--":  # What comes then is a command of a pod.
            break
        if not word.startswith("-"):
            names.append(word)
        elif flag in switches and not given:
            flags.setdefault(flag, []).append("")
        elif flag in values and (given or left):
            flags.setdefault(flag, []).append(value if given else left.pop(0))
        else:
            raise RefusedError(2, f"unrecognized arguments: {word}")
    return names, flags


def parse_gcloud(words: Sequence[str]) -> tuple[str, Spec, list[str], dict[str, str]]:
    """Return the command, its names and flags. Raises RefusedError."""
    left, name = list(words), ""
    while left and not left[0].startswith("-") and name not in GCLOUD:
        name = f"{name} {left.pop(0)}".strip()
    if name not in GCLOUD:
        raise RefusedError(2, f"Invalid choice: {name!r}")
    spec = GCLOUD[name]
    values = {*spec.values.replace("!", "").split(), "--project", "--format"}
    names, given = _flags(left, values, {*spec.switches.split(), "--quiet"})
    flags = {flag: many[-1] for flag, many in given.items()}
    if not names:
        raise RefusedError(2, "argument NAME: Must be specified.")
    must = [v.rstrip("!") for v in spec.values.split() if v.endswith("!")]
    for group in (*must, *spec.either):
        if len([flag for flag in group.split() if flag in flags]) != 1:
            raise RefusedError(2, f"argument {group}: Exactly one must be specified.")
    for group in spec.exclusive:
        if len([flag for flag in group.split() if flag in flags]) > 1:
            raise RefusedError(2, f"At most one of {group} can be specified.")
    for flag, needed in spec.pairs:
        if flag in flags and needed not in flags:
            raise RefusedError(2, f"argument {flag}: {needed} must be specified.")
    for flag in ("--data-file", "--metadata-from-file"):
        path = flags.get(flag, "").rpartition("=")[2]
        if path and not Path(path).is_file():
            raise RefusedError(2, f"argument {flag}: Unable to read file [{path}]")
    return name, spec, names, flags


def parse_kubectl(words: Sequence[str]) -> tuple[str, list[str], dict[str, list[str]]]:
    """Return the verb, names and flags. Raises RefusedError."""
    verb, *rest = words
    if verb not in KUBECTL:
        raise RefusedError(1, f'unknown command "{verb}" for "kubectl"')
    values, switches = KUBECTL[verb]
    return verb, *_flags(rest, {*values, "--context", "--namespace"}, switches)


@dataclasses.dataclass
class Cloud:
    """What the fake commands have made, and what they were told."""

    calls: list[list[str]] = dataclasses.field(default_factory=list)
    """Every command line so far."""
    made: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    """By kind/name: what `kubectl` has made; another cluster's after "CLUSTER:"."""
    jobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Every managed job, oldest first."""
    failing: tuple[str, int, str] | None = None

    @property
    def things(self) -> dict[str, dict[str, Any]]:
        """By kind and name: what `gcloud` has made, with its flags."""
        return {kind: made for kind, made in self.made.items() if made}

    def changes(self) -> list[list[str]]:
        """Return the calls that do not only look; forget all."""
        looks = {"describe", "get", "get-credentials", "queue"}
        found = [call for call in self.calls if not looks & set(call[:6])]
        self.calls.clear()
        return found

    def fail(self, command: str = "", code: int = 0, text: str = "") -> None:
        """Let every command line that begins so fail; without one, none."""
        self.failing = (command, code, text) if command else None

    def call(
        self, arguments: Sequence[str], **_: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, in the place of `subprocess.run`."""
        self.calls.append(list(arguments))
        tool, *words = arguments
        act = {"gcloud": self._gcloud, "kubectl": self._kubectl, "sky": self._sky}[tool]
        try:
            begin, code, text = self.failing or ("-", 0, "")
            if " ".join(arguments).removeprefix("gcloud ").startswith(begin):
                raise RefusedError(code, text)
            code, output, errors = 0, act(words), ""
        except RefusedError as failed:
            code, output, errors = failed.code, "", failed.text
        return subprocess.CompletedProcess(arguments, code, output, errors)

    # ---- gcloud -----------------------------------------------------------------

    def _gcloud(self, words: list[str]) -> str:
        command, spec, (name, *_), flags = parse_gcloud(words)
        kind = self.made.setdefault(spec.kind, {})
        there = ("describe", "delete", "ssh", "version", "label")
        if spec.verb in there and name not in kind:
            raise RefusedError(1, f"ERROR: ({command}) NOT_FOUND: {name} was not found")
        if spec.verb == "create":
            tags = [t for flag in TAGS for t in flags.get(flag, "").split(",")]
            if wrong := [tag for tag in tags if tag and not TAG.fullmatch(tag)]:
                raise RefusedError(1, f"ERROR: ({command}) Invalid value: {wrong}")
            if name in kind:
                raise RefusedError(1, f"ERROR: ({command}) ALREADY_EXISTS: {name}")
            disk = re.search(r"name=([^,]+)", flags.get("--disk", ""))
            if disk and disk[1] not in self.made.get("disk", {}):
                raise RefusedError(1, f"ERROR: disk {disk[1]} was not found")
            kind[name] = {"state": FRESH.get(spec.kind, name), **flags}
        elif spec.verb == "describe":
            label = re.fullmatch(r"value\(name,labels\.(.+)\)", flags["--format"])
            pairs = (p.split("=") for p in kind[name].get("--labels", "").split(","))
            labels = {pair[0]: pair[-1] for pair in pairs}
            shown = f"{name} {labels.get(label[1], '')}" if label else ""
            return shown or str(kind[name]["state"])
        elif spec.verb == "label":
            kind[name]["--labels"] += f",{flags['--update-labels']}"
        elif spec.verb == "bind" and spec.kind == "secret":
            kind[name].setdefault("readers", []).append(flags["--member"])
        elif spec.verb == "delete":
            del kind[name]
        return ""

    # ---- kubectl ----------------------------------------------------------------

    def _kubectl(self, words: list[str]) -> str:
        verb, names, flags = parse_kubectl(words)
        cluster = flags["--context"][0].rpartition("_")[2]
        # Those of the cluster of the coordinator have bare names.
        self._prefix = "" if cluster in ("tpus", "diloco") else f"{cluster}:"
        if verb == "apply":
            for made in yaml.safe_load_all(Path(flags["-f"][0]).read_text()):
                self._put(f"{made['kind'].lower()}/{made['metadata']['name']}", made)
        elif verb == "create":
            *kind, name = names
            files = map(Path, flags.get("--from-file", []))
            data = {file.name: len(file.read_bytes()) for file in files}
            if self._find(f"{kind[0]}/{name}") is not None:
                raise RefusedError(1, f"{kind[0]} {name!r} already exists")
            self._put(f"{kind[0]}/{name}", {"data": data})
        elif verb == "delete":
            if "/" not in names[0]:
                kinds, name = names
                names = [f"{kind}/{name}" for kind in kinds.split(",")]
            for name in names:
                self._require_kind(name.partition("/")[0])
                self.objects.pop(f"{self._prefix}{name}", None)
        elif verb == "label":
            kind, name, label = names
            key, _, value = label.partition("=")
            made = self.objects[f"{self._prefix}{kind}/{name}"]
            made.setdefault("metadata", {})["labels"] = {key: value}
        elif verb in ("wait", "exec", "cp"):
            name = names[0] if verb != "cp" else f"pod/{names[0].partition(':')[0]}"
            if (made := self._find(name)) is None:
                raise RefusedError(1, f'"{name}" not found')
            if name.startswith("job/") and verb == "wait":
                done = {"type": "Complete", "status": "True"}
                made["status"] = {"conditions": [done]}
            return json.dumps({"phase": "running"}) if verb == "exec" else ""
        elif verb == "logs":
            return f"logs of {names or flags['--selector']}"
        return self._got(*names, flags["-o"][0]) if verb == "get" else ""

    def _put(self, key: str, made: Any) -> None:
        self.objects[f"{self._prefix}{key}"] = made

    def _find(self, key: str) -> Any:
        return self.objects.get(f"{self._prefix}{key}")

    def _require_kind(self, kind: str) -> None:
        if kind not in KINDS:
            raise RefusedError(1, f"the server doesn't have a resource type {kind!r}")

    def _got(self, kind: str, name: str, output: str) -> str:
        """Return a name, and what the one JSONPath that is known asks for."""
        self._require_kind(kind)
        found = self._find(f"{kind}/{name}")
        if found is None:
            return ""
        status = found.get("status", {})
        labels = found.get("metadata", {}).get("labels", {})
        true = [
            c["type"] for c in status.get("conditions", []) if c["status"] == "True"
        ]
        shown = {
            "": "",
            " {.metadata.labels.diloco-content}": labels.get("diloco-content", ""),
            " {.status.terminalState}": status.get("terminalState", ""),
            ' {.status.conditions[?(@.status=="True")].type}': " ".join(true),
        }
        return f"{name} {shown[output.removeprefix('jsonpath={.metadata.name}')]}"

    # ---- sky --------------------------------------------------------------------

    def _sky(self, words: list[str]) -> str:
        group, verb, *rest = words
        if group != "jobs" or verb not in SKY:
            raise RefusedError(2, f"No such command '{group} {verb}'")
        names, given = _flags(rest, *SKY[verb])
        name = given.get("--name", [""])[0]
        if verb == "queue":
            if not self.jobs:
                raise RefusedError(1, "Error: No in-progress managed jobs.")
            return f"Fetching managed job statuses...\n{json.dumps(self.jobs)}"
        if verb == "launch":
            task = yaml.safe_load(Path(names[0]).read_text())
            job = {"job_id": len(self.jobs) + 1, "job_name": name, "task": task}
            self.jobs.append({**job, "status": "PENDING"})
        elif verb == "cancel":
            for job in self.jobs:
                if job["job_name"] == name and job["status"] not in ENDED:
                    job["status"] = "CANCELLED"
        return f"logs of {name}" if verb == "logs" else ""
