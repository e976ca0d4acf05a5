"""The Kubernetes objects of a launch: the templates of `gke.yaml`, filled in.

There is one JobSet per island, so that each restarts by itself. Labels and values are
strings. `tests/golden/launch` has what is rendered.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import shlex
from importlib import resources
from typing import Any

import yaml

from diloco_jax.config.placement import variables_of
from diloco_jax.hardware.machines import machine_of
from diloco_jax.hardware.tpus import GIB, HOST_MACHINES
from diloco_jax.launch.spec import (
    CERTIFICATES,
    CONFIG_FOLDER,
    COORDINATOR,
    DATA,
    PERMIT,
    PLATFORMS,
    PORT,
    PORTS,
    WORKDIR,
    LaunchSpec,
    PlacedIsland,
)
from diloco_jax.wire import peers

Manifest = dict[str, Any]

NOTICE_S = {"spot": 15, "reserved": 60, "on_demand": 60}
"""Seconds from SIGTERM to SIGKILL. A Spot node has 15 s, whatever a pod asks for."""
GOODBYE_S = 5
"""Seconds of the notice that the goodbye and the end of the process need."""
STOP_S = 60
"""Seconds of notice for the coordinator, which writes a snapshot and the summary."""
REQUESTED = 0.8
"""Share of a machine that its one pod asks for. The rest is the node's own."""
PART, ISLAND = "diloco-part", "diloco-island"
"""Taint of the coordinator's pool; label of an island's pools."""
POOL = "cloud.google.com/gke-nodepool"
PERMIT_FILE = f"{WORKDIR}/{PERMIT}"
GIVES_PORT = PORT + 2
"""Port of an island's host for others of its region."""
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
"""Addresses of nodes and pods of other clusters."""
NOT_OUTSIDE = dict.fromkeys(
    ("internal", "from_everywhere", "service_type", "balancer_address")
)
"""Values of a service that is reached in its cluster alone."""


# ---- objects ------------------------------------------------------------------------


def coordinator(spec: LaunchSpec, now_unix: int) -> list[Manifest]:
    """Return account, service, policy, disruption budget and Job of the coordinator.

    now_unix: the last hour counts from then.
    """
    host = spec.settings.coordinator_address or spec.inside
    command = shlex.join(["diloco", *spec.coordinator_arguments(f"{host}:{PORT}")])
    script = f"""\
if [ -d {WORKDIR}/log ]; then rm -f {PERMIT_FILE}; fi
if [ -e {PERMIT_FILE} ]; then set -- {shlex.join(spec.init_arguments())}; fi
{_asked_to_end(f'{command} "$@"', spec.end_unix(now_unix))}"""
    names = {PORT: "control", PORT + 1: "bulk"}
    ingress = [_islands_may(spec, PORTS)]
    name, address = spec.coordinator, spec.settings.coordinator_address
    reached: Manifest = {}
    if address:  # From elsewhere, behind an internal load balancer.
        reached = {
            "internal": "Internal",
            "from_everywhere": "true",
            "service_type": "LoadBalancer",
            "balancer_address": address if _is_number(address) else None,
        }
    return _serving(
        spec, name, COORDINATOR, COORDINATOR, script, names, ingress, reached
    )


def worker(spec: LaunchSpec, number: int, now_unix: int) -> list[Manifest]:
    """Return account, service, policy, disruption budget and Job of a worker on a
    machine of its own."""
    command = shlex.join(["diloco", *spec.worker_arguments(number)])
    script = _asked_to_end(command, spec.end_unix(now_unix))
    lead = {"podSelector": {"matchLabels": _labels(spec, COORDINATOR)}}
    ingress = [
        {"from": [lead], "ports": _tcp((PORT,))},
        _islands_may(spec, (PORT + 1,)),
    ]
    name, stem = spec.workers[number], peers.worker(number).stem
    names = {PORT: "lead", PORT + 1: "bulk"}
    return _serving(
        spec, name, part_of_worker(number), stem, script, names, ingress, {}
    )


def part_of_worker(number: int) -> str:
    """Return the part of the run that a worker is, in labels."""
    return f"worker-{number}"


def disk(spec: LaunchSpec, name: str, part: str) -> Manifest:
    """Return the disk on which a coordinator, or a worker, keeps its part of the run.
    It is an object of its own, which outlives the Job."""
    size = f"{spec.settings.coordinator_disk_gb}Gi"
    return _made(spec, "disk", name, part, size=size)


def permit(spec: LaunchSpec) -> Manifest:
    """Return the Job that lets the run begin on its disk. It is done once; the object
    stays, so that it is not done again on a disk that replaces a lost one."""
    put = f"[ -d {WORKDIR}/log ] || touch {PERMIT_FILE}; sync"
    command = ["/bin/bash", "-c", put]
    return _made(spec, "permit", spec.permit, PERMIT, command=command)


def reader(spec: LaunchSpec) -> Manifest:
    """Return the pod from which results are copied off the coordinator's disk, beside
    the coordinator or after it."""
    command = ["/bin/sleep", "infinity"]
    return _made(spec, "reader", reader_name(spec), "reader", command=command)


def reader_name(spec: LaunchSpec) -> str:
    """Return the name of that pod."""
    return f"{spec.name}-reader"


def config_map(spec: LaunchSpec) -> Manifest:
    """Return the ConfigMap from which every pod reads the config. A label says which
    one it is."""
    own = {"digest": config_digest(spec), "config_json": spec.config_json}
    return _made(spec, "config_map", config_name(spec), "all", **own)


def config_name(spec: LaunchSpec) -> str:
    """Return the name of the ConfigMap."""
    return f"{spec.name}-config"


def config_digest(spec: LaunchSpec) -> str:
    """Return a digest of the config that fits into a label."""
    return hashlib.sha256(spec.config_json.encode()).hexdigest()[:32]


def island(spec: LaunchSpec, island: PlacedIsland, now_unix: int) -> list[Manifest]:
    """Return the island's account, the policy that closes its ports to all others, and
    its JobSet.

    now_unix: first incarnation of this JobSet, above those of any JobSet before it.
    """
    name, settings, found = island.resource, spec.settings, island.slice
    own = {"podSelector": {"matchLabels": _labels(spec, island.name)}}
    ingress: list[Manifest] = [{"from": [own]}]
    serve, pod_address = "", None
    if island.in_region:
        ingress.append(_islands_may(spec, (GIVES_PORT,)))
        serve = f" --serve $POD_ADDRESS:{GIVES_PORT}"
        own_address = {"fieldRef": {"fieldPath": "status.podIP"}}
        pod_address = {"name": "POD_ADDRESS", "valueFrom": own_address}
    notice_s = NOTICE_S[island.purchase]
    address = f"{spec.host_for(island.cluster)}:{PORT}"
    arguments = spec.island_arguments(island, address, float(notice_s - GOODBYE_S))
    before, limit = _until(spec.end_unix(now_unix), notice_s)
    number = f"--incarnation $(({now_unix} + RESTART_ATTEMPT))"
    command = shlex.join(["diloco", *arguments])
    several, spot = len(island.zones) > 1, island.purchase == "spot"
    tolerates = {"key": "cloud.google.com/gke-spot", "operator": "Exists"}
    chips = str(found.chips_per_host)
    requests = _requests(*HOST_MACHINES[found.machine_type])
    return [
        _made(
            spec,
            "account",
            name,
            island.name,
            cloud_account=settings.service_account or None,
        ),
        _made(spec, "policy", name, island.name, ingress=ingress),
        _made(
            spec,
            "jobset",
            name,
            island.name,
            **_pod(spec, peers.island(island.name).stem, island.name),
            queue=settings.queue or None,
            exclusive=POOL if several else None,
            hosts=found.hosts,
            notice_s=notice_s,
            accelerator=found.generation.node_label,
            shape=found.shape,
            only_pool=None if several else name,
            one_of_pools=name if several else None,
            spot="true" if spot else None,
            tolerates_spot=tolerates if spot else None,
            script=f"{before}exec {limit}{command}{serve} {number}\n",
            pod_address=pod_address,
            platforms=PLATFORMS,
            requests_and_chips={**requests, "google.com/tpu": chips},
            chips=chips,
        ),
    ]


def _serving(
    spec: LaunchSpec,
    name: str,
    part: str,
    stem: str,
    script: str,
    ports: dict[int, str],
    ingress: list[Manifest],
    reached: Manifest,
) -> list[Manifest]:
    """Return all that a coordinator, or a worker, is in the cluster, which has a disk
    and a machine for itself.

    name: of everything. part: of the run, in labels. stem: of its certificates. script:
    what its pod runs. ports: their names. ingress: who reaches them. reached: values of
    a service that is reached from elsewhere.
    """
    machine = machine_of(spec.settings.coordinator_machine)
    named = [{"name": name, "port": port} for port, name in ports.items()]
    account = spec.account_of(COORDINATOR) or None
    return [
        _made(spec, "account", name, part, cloud_account=account),
        _made(spec, "service", name, part, ports=named, **(NOT_OUTSIDE | reached)),
        _made(spec, "policy", name, part, ingress=ingress),
        _made(spec, "budget", name, part),
        _made(
            spec,
            "job",
            name,
            part,
            **_pod(spec, stem, COORDINATOR),
            notice_s=STOP_S,
            script=script,
            container_ports=[{"containerPort": port} for port in ports],
            port=PORT,
            requests=_requests(machine.cores, machine.memory / GIB),
        ),
    ]


def _pod(spec: LaunchSpec, stem: str, owner: str) -> Manifest:
    """Return the values that all pods of processes have. stem: of its certificates.
    owner: whose variables it gets."""
    text = spec.settings.data
    values: Manifest = {
        "secret": spec.secrets[stem],
        "config": config_name(spec),
        "config_folder": CONFIG_FOLDER,
        "certificates": CERTIFICATES,
        "variables": _variables(spec, owner),
        **dict.fromkeys(("data_volume", "data_mount", "copies_data")),
    }
    if text and not stem.startswith("worker"):
        reads = f"diloco manifest --missing {DATA} || true"
        images = {"image": spec.settings.image}
        images["cloud_image"] = spec.settings.cloud_image
        copies = {"text": text, "data": DATA, "reads": reads, **images}
        values |= {
            "data_volume": {"name": "data", "emptyDir": {}},
            "data_mount": {"name": "data", "mountPath": DATA},
            "copies_data": _filled(_templates()["copies_data"], copies),
        }
    return values


def _variables(spec: LaunchSpec, owner: str) -> list[Manifest]:
    """Return the launch's variables for a part of the run. A secret's key is the name
    of the variable."""
    plain, secret = variables_of(spec.settings, owner)
    kept = {
        name: {"secretKeyRef": {"name": where, "key": name}}
        for name, where in secret.items()
    }
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *({"name": name, "valueFrom": source} for name, source in kept.items()),
    ]


def _requests(cores: int, gib: float) -> dict[str, str]:
    memory = round(REQUESTED * gib)
    return {"cpu": str(round(REQUESTED * cores)), "memory": f"{memory}Gi"}


def _islands_may(spec: LaunchSpec, to: tuple[int, ...]) -> Manifest:
    """Return the rule that lets the run's islands, wherever they are, come to these
    ports."""
    peers: list[Manifest] = [
        {"podSelector": {"matchLabels": {"diloco-run": spec.name}}}
    ]
    if spec.settings.coordinator_address:
        peers += [{"ipBlock": {"cidr": block}} for block in PRIVATE]
    return {"from": peers, "ports": _tcp(to)}


def _tcp(ports: tuple[int, ...]) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _labels(spec: LaunchSpec, part: str) -> dict[str, str]:
    return {"app": "diloco", "diloco-run": spec.name, "diloco-part": part}


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


# ---- what pods run ------------------------------------------------------------------


def _until(end_unix: int, grace_s: float) -> tuple[str, str]:
    """Return shell lines, and the words before a command, by which it is ended by
    SIGTERM at `end_unix` (0 = never), and by SIGKILL `grace_s` later. Started after
    that, the lines end with 0."""
    if not end_unix:
        return "", ""
    lines = (
        f"left=$(({end_unix} - $(date +%s)))\n"
        f"if [ $left -le 0 ]; then echo 'launch.max_hours are over'; exit 0; fi\n"
    )
    return lines, f"timeout --foreground --kill-after={grace_s:g} $left "


def _asked_to_end(command: str, end_unix: int) -> str:
    """Return shell lines that run the command until the last hour, and end as it does,
    but with 1 instead of 0 if the pod was asked to end, as where its node is drained:
    the Job would count as complete, which says that the run is over."""
    before, limit = _until(end_unix, STOP_S)
    return f"""\
{before}asked= child= code=0
ask() {{ if [ "$child" ]; then kill -TERM "$child" 2>/dev/null || true; fi; }}
trap 'asked=yes; ask' TERM
{limit}{command} &
child=$!
# It may have been asked before its number was known.
if [ "$asked" ]; then ask; fi
wait "$child" || code=$?
while [ "$asked" ] && kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
if [ "$asked" ]; then
  code=0
  wait "$child" || code=$?
  if [ "$code" = 0 ]; then code=1; fi
fi
exit "$code"
"""


# ---- templates ----------------------------------------------------------------------


@functools.cache
def _templates() -> dict[str, Any]:
    file = resources.files("diloco_jax.launch").joinpath("gke.yaml")
    templates: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return templates


def _made(
    spec: LaunchSpec, template: str, name: str, part: str, **values: Any
) -> Manifest:
    """Return the object of a template. values: by name, beside those of the launch."""
    made: Manifest = _filled(
        _templates()[template],
        {
            "name": name,
            "namespace": spec.settings.namespace,
            "run": spec.name,
            "part": part,
            "coordinator": spec.coordinator,
            "image": spec.settings.image,
            "workdir": WORKDIR,
            "retries": spec.fruitless_starts - 1,
            **values,
        },
    )
    return made


def _filled(node: Any, values: Manifest) -> Any:
    """Return a copy with values in place of their $NAMEs; None where all are None."""
    if isinstance(node, str) and node.startswith("$"):
        return values[node[1:]]
    if isinstance(node, dict):
        made = {key: _filled(value, values) for key, value in node.items()}
        made = {key: value for key, value in made.items() if value is not None}
        return made if made or not node else None
    if isinstance(node, list):
        items: list[Any] = []
        for item in node:
            value = _filled(item, values)
            items += value if isinstance(value, list) else [value]
        return [item for item in items if item is not None]
    return node


def yaml_text(*objects: Manifest) -> str:
    """Return the documents of one file, as people can read them."""
    text: str = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Dumper that writes scripts and files as blocks of lines, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
