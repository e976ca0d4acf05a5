"""The Kubernetes objects of a launch, as plain values, and as YAML.

There is one JobSet per island, so that each restarts by itself. Labels and values are
strings. `tests/golden/launch` has what is rendered.
"""

from __future__ import annotations

import hashlib
import ipaddress
import shlex
from typing import Any

import yaml

from diloco_jax import run_files
from diloco_jax.config.launch import variables_of
from diloco_jax.hardware.machines import GIB, machine_of
from diloco_jax.hardware.tpus import HOST_MACHINES
from diloco_jax.launch.order import (
    CERTIFICATES,
    CONFIG_FOLDER,
    COORDINATOR,
    DATA,
    PERMIT,
    PLATFORMS,
    PORT,
    WORKDIR,
    Order,
    PlacedIsland,
)
from diloco_jax.launch.submit import CONTENT
from diloco_jax.wire import principal

Manifest = dict[str, Any]

NOTICE_S = {"spot": 15, "reserved": 60, "on_demand": 60}
"""Seconds from SIGTERM to SIGKILL. A Spot node has 15 s, whatever a pod asks for."""
GOODBYE_S = 5
"""Seconds of the notice that the goodbye and the end of the process need."""
STOP_S = 60
"""Seconds of notice for the coordinator, which writes a snapshot and the summary."""
TPU_PORTS = (8471, 8482, 8431)
"""Ports of libtpu, JAX and the runtime metrics."""
REQUESTED = 0.8
"""Share of a machine that its one pod asks for. The rest is the node's own."""
PART, ISLAND = "diloco-part", "diloco-island"
"""Taint of the coordinator's pool; label of an island's pools."""
POOL = "cloud.google.com/gke-nodepool"
PERMIT_FILE = f"{WORKDIR}/{PERMIT}"
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
"""Addresses of nodes and pods of other clusters."""
HOPELESS = {
    "action": "FailJob",
    "onExitCodes": {"containerName": "diloco", "operator": "In", "values": [2, 3]},
}
"""Bad config, or refused by the coordinator: no attempt will help."""
DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]
ON_COORDINATORS_POOL = [{"key": PART, "operator": "Equal", "value": COORDINATOR}]


# ---- the coordinator and workers ----------------------------------------------------


def coordinator(order: Order, now_unix: int) -> list[Manifest]:
    """Return account, service, policy, disruption budget and Job of the coordinator.

    now_unix: the last hour counts from then.
    """
    host = order.settings.coordinator_address or order.inside
    command = shlex.join(["diloco", *order.coordinator_arguments(f"{host}:{PORT}")])
    script = f"""\
if [ -d {WORKDIR}/log ]; then rm -f {PERMIT_FILE}; fi
if [ -e {PERMIT_FILE} ]; then set -- {shlex.join(order.init_arguments())}; fi
{_asked_to_end(f'{command} "$@"', order.end_unix(now_unix))}"""
    ingress = [_islands_may(order, order.ports)]
    names = {port: f"worker-{n - 2}" for n, port in enumerate(order.ports)}
    names |= {PORT: "control", PORT + 1: "bulk"}
    return _serving(
        order, order.coordinator, COORDINATOR, COORDINATOR, script, names, ingress
    )


def worker(order: Order, number: int, now_unix: int) -> list[Manifest]:
    """Return account, service, policy, disruption budget and Job of a worker on a
    machine of its own."""
    command = shlex.join(["diloco", *order.worker_arguments(number)])
    script = _asked_to_end(command, order.end_unix(now_unix))
    lead = {"podSelector": {"matchLabels": _labels(order, COORDINATOR)}}
    ingress = [
        {"from": [lead], "ports": _tcp((PORT,))},
        _islands_may(order, (PORT + 1,)),
    ]
    name, stem = order.workers[number], principal.worker(number).stem
    names = {PORT: "lead", PORT + 1: "bulk"}
    return _serving(order, name, part_of_worker(number), stem, script, names, ingress)


def part_of_worker(number: int) -> str:
    """Return the part of the run that a worker is, in labels."""
    return f"worker-{number}"


def disk(order: Order, name: str, part: str) -> Manifest:
    """Return the disk on which a coordinator, or a worker, keeps its part of the run.
    It is an object of its own, which outlives the Job."""
    size = f"{order.settings.coordinator_disk_gb}Gi"
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": size}},
    }
    return _object(order, "v1", "PersistentVolumeClaim", name, part, spec=spec)


def permit(order: Order) -> Manifest:
    """Return the Job that lets the run begin on its disk. It is done once; the object
    stays, so that it is not done again on a disk that replaces a lost one."""
    put = f"[ -d {WORKDIR}/log ] || touch {PERMIT_FILE}; sync"
    spec = {
        "backoffLimit": order.fruitless_starts - 1,
        "template": {
            "metadata": {"labels": _labels(order, PERMIT)},
            "spec": _beside_disk(order, ["/bin/bash", "-c", put]),
        },
    }
    return _object(order, "batch/v1", "Job", order.permit, PERMIT, spec=spec)


def reader(order: Order) -> Manifest:
    """Return the pod from which results are copied off the coordinator's disk, beside
    the coordinator or after it."""
    spec = _beside_disk(order, ["/bin/sleep", "infinity"])
    spec["activeDeadlineSeconds"] = 24 * 3600
    return _object(order, "v1", "Pod", reader_name(order), "reader", spec=spec)


def reader_name(order: Order) -> str:
    """Return the name of that pod."""
    return f"{order.name}-reader"


def config_map(order: Order) -> Manifest:
    """Return the ConfigMap from which every pod reads the config. A label says which
    one it is."""
    data = {run_files.CONFIG: order.config_json}
    made = _object(order, "v1", "ConfigMap", config_name(order), "all", data=data)
    made["metadata"]["labels"][CONTENT] = config_digest(order)
    return made


def config_name(order: Order) -> str:
    """Return the name of the ConfigMap."""
    return f"{order.name}-config"


def config_digest(order: Order) -> str:
    """Return a digest of the config that fits into a label."""
    return hashlib.sha256(order.config_json.encode()).hexdigest()[:32]


def yaml_text(*objects: Manifest) -> str:
    """Return the documents of one file, as people can read them."""
    text: str = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)
    return text


def _serving(
    order: Order,
    name: str,
    part: str,
    stem: str,
    script: str,
    ports: dict[int, str],
    ingress: list[Manifest],
) -> list[Manifest]:
    """Return all that a coordinator, or a worker, is in the cluster, which has a disk
    and a machine for itself.

    name: of everything. part: of the run, in labels. stem: of its certificates. script:
    what its pod runs. ports: their names. ingress: who reaches them.
    """
    volumes = [*_volumes(order, stem), _disk_volume(name)]
    machine = machine_of(order.settings.coordinator_machine)
    container = {
        "name": "diloco",
        "image": order.settings.image,
        "command": ["/bin/bash", "-c", script],
        "env": _variables(order, COORDINATOR),
        "ports": [{"containerPort": port} for port in ports],
        "readinessProbe": {"tcpSocket": {"port": PORT}},
        "resources": {"requests": _requests(machine.cores, machine.memory / GIB)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(volumes),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_S,
        "serviceAccountName": name,
        "automountServiceAccountToken": False,
        "nodeSelector": {POOL: order.coordinator},
        "tolerations": ON_COORDINATORS_POOL,
        **(_copies_data(order) if stem == COORDINATOR else {}),
        "containers": [container],
        "volumes": volumes,
    }
    labels = _labels(order, part)
    safe = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    job = {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": order.fruitless_starts - 1,
        # Two on one disk: the second waits until the first has ended.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [HOPELESS, {"action": "Ignore", "onPodConditions": DISRUPTED}]
        },
        "template": {"metadata": {"labels": labels, "annotations": safe}, "spec": pod},
    }
    budget = {"minAvailable": 1, "selector": {"matchLabels": labels}}
    return [
        _account(order, name, part, order.coordinators_account),
        _service(order, name, part, ports),
        _policy(order, name, part, ingress),
        _object(order, "policy/v1", "PodDisruptionBudget", name, part, spec=budget),
        _object(order, "batch/v1", "Job", name, part, spec=job),
    ]


def _beside_disk(order: Order, command: list[str]) -> Manifest:
    """Return a pod that has the coordinator's disk, and nothing else."""
    volumes = [_disk_volume(order.coordinator)]
    container = {
        "name": "diloco",
        "image": order.settings.image,
        "command": command,
        "volumeMounts": _mounts(volumes),
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "nodeSelector": {POOL: order.coordinator},
        "tolerations": ON_COORDINATORS_POOL,
        "containers": [container],
        "volumes": volumes,
    }


def _service(order: Order, name: str, part: str, ports: dict[int, str]) -> Manifest:
    """Return a service: in its cluster, or behind an internal load balancer if the
    coordinator is to be reached from elsewhere."""
    spec: Manifest = {
        "selector": _labels(order, part),
        "ports": [{"name": name, "port": port} for port, name in ports.items()],
    }
    made = _object(order, "v1", "Service", name, part, spec=spec)
    address = order.settings.coordinator_address if part == COORDINATOR else ""
    if address:
        made["metadata"]["annotations"] = {
            "networking.gke.io/load-balancer-type": "Internal",
            # From other regions, too.
            "networking.gke.io/internal-load-balancer-allow-global-access": "true",
        }
        spec["type"] = "LoadBalancer"
        if _is_number(address):
            spec["loadBalancerIP"] = address
    return made


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


# ---- islands ------------------------------------------------------------------------


def island(order: Order, island: PlacedIsland, now_unix: int) -> list[Manifest]:
    """Return the island's account, the policy that closes its ports to all others, and
    its JobSet.

    now_unix: first incarnation of this JobSet, above those of any JobSet before it.
    """
    name, account = island.resource, order.settings.service_account
    own = {"podSelector": {"matchLabels": _labels(order, island.name)}}
    ingress: list[Manifest] = [{"from": [own]}]
    if island.offer_ports:
        ingress.append(_islands_may(order, island.offer_ports))
    return [
        _account(order, name, island.name, account),
        _policy(order, name, island.name, ingress),
        _jobset(order, island, now_unix),
    ]


def _jobset(order: Order, island: PlacedIsland, now_unix: int) -> Manifest:
    """Return the island's JobSet: as many pods as the slice has hosts, all or none."""
    job = {
        "parallelism": island.slice.hosts,
        "completions": island.slice.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [HOPELESS, {"action": "FailJob", "onPodConditions": DISRUPTED}]
        },
        "template": {
            "metadata": {"labels": _labels(order, island.name)},
            "spec": _island_pod(order, island, now_unix),
        },
    }
    hopeless = {
        "name": "hopeless",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [".*exit code [23] .*"],
    }
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "failurePolicy": {
            "maxRestarts": order.fruitless_starts - 1,
            # No new pod starts before the last old one has released its chips.
            "restartStrategy": "BlockingRecreate",
            "rules": [hopeless, preempted],
        },
        "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": job}}],
    }
    version = "jobset.x-k8s.io/v1alpha2"
    made = _object(order, version, "JobSet", island.resource, island.name, spec=spec)
    if len(island.zones) > 1:
        # All pods in one of the island's pools.
        exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": POOL}
        made["metadata"]["annotations"] = exclusive
    if order.settings.queue:
        made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = order.settings.queue
    return made


def _island_pod(order: Order, island: PlacedIsland, now_unix: int) -> Manifest:
    """Return the pod that runs on every host of the island's slice."""
    notice_s, found = NOTICE_S[island.purchase], island.slice
    address = f"{order.host_for(island.cluster)}:{PORT}"
    arguments = order.island_arguments(island, address, float(notice_s - GOODBYE_S))
    command = shlex.join(["diloco", *arguments])
    before, limit = _until(order.end_unix(now_unix), notice_s)
    number = f"--incarnation $(({now_unix} + RESTART_ATTEMPT))"
    script = f"{before}exec {limit}{command} {number}\n"
    attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    chips = {"google.com/tpu": str(found.chips_per_host)}
    size = _requests(*HOST_MACHINES[found.machine_type])
    volumes = [
        *_volumes(order, principal.island(island.name).stem),
        {"name": "run", "emptyDir": {}},
    ]
    selector = {
        "cloud.google.com/gke-tpu-accelerator": found.generation.node_label,
        "cloud.google.com/gke-tpu-topology": found.shape,
        # The island's own pools: another island's pods never take part of the slice.
        ISLAND if len(island.zones) > 1 else POOL: island.resource,
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists"}]
    if island.purchase == "spot":
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append({"key": "cloud.google.com/gke-spot", "operator": "Exists"})
    container = {
        "name": "diloco",
        "image": order.settings.image,
        "command": ["/bin/bash", "-c", script],
        "env": [
            {
                "name": "RESTART_ATTEMPT",
                "valueFrom": {"fieldRef": {"fieldPath": attempt}},
            },
            # Without TPUs the island fails; it does not train on the CPU.
            {"name": "JAX_PLATFORMS", "value": PLATFORMS},
            *_variables(order, island.name),
        ],
        "ports": [{"containerPort": port} for port in TPU_PORTS],
        "resources": {"requests": {**size, **chips}, "limits": chips},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": _mounts(volumes),
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": notice_s,
        "serviceAccountName": island.resource,
        "automountServiceAccountToken": False,
        "nodeSelector": selector,
        "tolerations": tolerations,
        **_copies_data(order),
        "containers": [container],
        "volumes": volumes,
    }


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


# ---- parts of objects ---------------------------------------------------------------


def _islands_may(order: Order, to: tuple[int, ...]) -> Manifest:
    """Return the rule that lets the run's islands, wherever they are, come to these
    ports."""
    run = {"podSelector": {"matchLabels": {"diloco-run": order.name}}}
    peers: list[Manifest] = [run]
    if order.settings.coordinator_address:
        peers += [{"ipBlock": {"cidr": block}} for block in PRIVATE]
    return {"from": peers, "ports": _tcp(to)}


def _tcp(ports: tuple[int, ...]) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _policy(order: Order, name: str, part: str, ingress: list[Manifest]) -> Manifest:
    """Return the policy that lets nobody else into the part's pods."""
    spec = {
        "podSelector": {"matchLabels": _labels(order, part)},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    version = "networking.k8s.io/v1"
    return _object(order, version, "NetworkPolicy", name, part, spec=spec)


def _account(order: Order, name: str, part: str, cloud_account: str) -> Manifest:
    """Return the account of the part's pods. Workload Identity makes it the cloud's
    account, if there is one."""
    made = _object(order, "v1", "ServiceAccount", name, part)
    if cloud_account:
        acts_as = {"iam.gke.io/gcp-service-account": cloud_account}
        made["metadata"]["annotations"] = acts_as
    return made


def _requests(cores: int, gib: float) -> dict[str, str]:
    memory = round(REQUESTED * gib)
    return {"cpu": str(round(REQUESTED * cores)), "memory": f"{memory}Gi"}


def _disk_volume(claimed: str) -> Manifest:
    return {"name": "run", "persistentVolumeClaim": {"claimName": claimed}}


def _volumes(order: Order, stem: str) -> list[Manifest]:
    """stem: that of the certificates' files."""
    secret = {"secretName": order.secrets[stem], "defaultMode": 0o400}
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": config_name(order)}},
        {"name": "certificates", "secret": secret},
    ]
    if order.settings.data and not stem.startswith("worker"):
        volumes.append({"name": "data", "emptyDir": {}})
    return volumes


def _mounts(volumes: list[Manifest]) -> list[Manifest]:
    places = {
        "config": CONFIG_FOLDER,
        "certificates": CERTIFICATES,
        "data": DATA,
        "run": WORKDIR,
    }
    return [
        {"name": volume["name"], "mountPath": places[volume["name"]]}
        for volume in volumes
    ]


def _variables(order: Order, owner: str) -> list[Manifest]:
    """Return the launch's variables for a part of the run. A secret's key is the name
    of the variable."""
    plain, secret = variables_of(order.settings, owner)
    kept = {
        name: {"secretKeyRef": {"name": where, "key": name}}
        for name, where in secret.items()
    }
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *({"name": name, "valueFrom": source} for name, source in kept.items()),
    ]


def _copies_data(order: Order) -> Manifest:
    """Return the init part of a pod, which fetches the text before anything else, and
    makes the manifests that did not come with it."""
    if not order.settings.data:
        return {}
    mounts = [{"name": "data", "mountPath": DATA}]
    copy = ["gcloud", "storage", "rsync", "--recursive", order.settings.data, DATA]
    # `diloco` itself tells what is wrong with a file, with an exit code of its own.
    read = ["/bin/bash", "-c", f"diloco manifest --missing {DATA} || true"]
    parts = {
        "data": (order.settings.cloud_image, copy),
        "manifests": (order.settings.image, read),
    }
    return {
        "initContainers": [
            {"name": name, "image": image, "command": command, "volumeMounts": mounts}
            for name, (image, command) in parts.items()
        ]
    }


def _object(
    order: Order, version: str, kind: str, name: str, part: str, **fields: Any
) -> Manifest:
    metadata = {
        "name": name,
        "namespace": order.settings.namespace,
        "labels": _labels(order, part),
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _labels(order: Order, part: str) -> dict[str, str]:
    return {"app": "diloco", "diloco-run": order.name, "diloco-part": part}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Dumper that writes scripts and files as blocks of lines, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
