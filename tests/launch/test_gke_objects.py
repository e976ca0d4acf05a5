"""Objects of a launch on GKE: against published schemas, and in several clusters."""

import dataclasses

import jobset_schema
import jsonschema
import kubernetes_validate
import pytest
from gke_support import container_script, job_and_pod, jobset, rendered
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from diloco_jax.config import ConfigError

KUBERNETES = ("1.33", "1.37")
"""Versions of Kubernetes whose schemas hold; GKE has these and those between."""
ELSEWHERE = {
    "zones": {"v5p": "us-east5-a", "v6e.b": "us-central1-b"},
    "clusters": {"v6e.b": "us-central1/far"},
    "coordinator_address": "10.20.0.9",
}
SETTINGS = [
    {},
    {"data": "gs://bucket/text", "max_hours": 4.5, "queue": "tpus"},
    {"purchase": {"v5p": "reserved:mine", "v6e.b": "spot"}, "namespace": "train"},
    {**ELSEWHERE, "service_account": "a@b.iam.gserviceaccount.com"},
    {"zones": {"v5p": "us-east5-a us-east5-c", "v6e.b": "us-east5-b"}},
]
settings = pytest.mark.parametrize("settings", SETTINGS)


def dropped(given, kept, path=""):
    """Paths of what a model did not know, and therefore left out."""
    if isinstance(given, dict):
        for name, value in given.items():
            here = f"{path}.{name}"
            if name not in kept:
                yield here
            else:
                yield from dropped(value, kept[name], here)
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from dropped(one, other, f"{path}[{number}]")


@settings
def test_every_object_is_valid_in_kubernetes(config, settings):
    made = rendered(config, **settings)
    kinds = {kind for kind, _ in made}
    assert kinds == {
        *("ConfigMap", "PersistentVolumeClaim", "Service", "Job", "Pod"),
        *("NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "JobSet"),
    }
    for version in KUBERNETES:
        for (kind, _), value in made.items():
            if kind != "JobSet":
                kubernetes_validate.validate(value, version, strict=True)
                continue
            # A JobSet's template is a Job's.
            _, job, _ = job_and_pod(value)
            whole = {"apiVersion": "batch/v1", "kind": "Job", "spec": job}
            kubernetes_validate.validate(whole, version, strict=True)
    job["template"]["spec"]["nodeSelectors"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(whole, version, strict=True)


def test_each_worker_apart_has_a_pod_a_disk_and_a_key_and_obeys_the_coordinator(
    config,
):
    placement = dataclasses.replace(config.placement, workers=2)
    config = dataclasses.replace(config, placement=placement)
    made = rendered(config, workers_apart=True, data="gs://bucket/text")
    for version in KUBERNETES:
        for (kind, _), value in made.items():
            if kind != "JobSet":
                kubernetes_validate.validate(value, version, strict=True)
    for number in range(2):
        name = f"two-worker-{number}"
        job = made["Job", name]["spec"]
        labels = job["template"]["metadata"]["labels"]
        pod = job["template"]["spec"]
        command = f"diloco worker /var/lib/diloco/config/config.json --index {number}"
        assert f"exec {command} --workdir" in container_script(pod)
        claims = [
            v["persistentVolumeClaim"] for v in pod["volumes"] if v["name"] == "run"
        ]
        assert claims == [{"claimName": name}]
        secrets = [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
        assert secrets == [f"{name}-certificates"]
        assert ("PersistentVolumeClaim", name) in made
        assert "initContainers" not in pod, "it reads no text"
        service = made["Service", name]["spec"]
        assert service["selector"] == labels
        assert [port["port"] for port in service["ports"]] == [7077, 7078]
        policy = made["NetworkPolicy", name]["spec"]
        assert policy["podSelector"]["matchLabels"] == labels
        lead, islands = policy["ingress"]
        coordinator = made["Job", "two-coordinator"]["spec"]["template"]["metadata"]
        (peer,) = lead["from"]
        assert peer == {"podSelector": {"matchLabels": coordinator["labels"]}}
        assert [port["port"] for port in lead["ports"]] == [7077]
        assert [port["port"] for port in islands["ports"]] == [7078]
    assert ("Job", "two-worker-0") not in rendered(config)


@settings
def test_every_jobset_has_only_fields_of_a_jobset(config, settings):
    for (kind, _), value in rendered(config, **settings).items():
        if kind != "JobSet":
            continue
        read = JobsetV1alpha2JobSet.from_dict(value).to_dict()
        assert list(dropped(value, read)) == []
        value["spec"]["failurePolicy"]["restartStrategies"] = "Recreate"
        read = JobsetV1alpha2JobSet.from_dict(value).to_dict()
        assert list(dropped(value, read)) == [".spec.failurePolicy.restartStrategies"]
        value["spec"]["failurePolicy"]["maxRestarts"] = "many"
        with pytest.raises(ValueError, match="maxRestarts"):
            JobsetV1alpha2JobSet.from_dict(value)


@pytest.mark.skipif(
    not jobset_schema.path().is_file(),
    reason=f"no JobSet schema at {jobset_schema.path()}; {jobset_schema.VARIABLE} "
    f"names one",
)
def test_every_jobset_is_valid_against_the_clusters_schema(config):
    validator = jsonschema.Draft202012Validator(jobset_schema.load())
    for changed in SETTINGS:
        made = [v for (kind, _), v in rendered(config, **changed).items()]
        jobsets = [value for value in made if value["kind"] == "JobSet"]
        assert len(jobsets) == 2
        for value in jobsets:
            validator.validate(value)
    value["spec"]["failurePolicy"]["restartStrategy"] = "Sometimes"
    assert not validator.is_valid(value)


@settings
def test_jobsets_keep_the_rules_that_no_schema_holds(config, settings):
    for (kind, name), value in rendered(config, **settings).items():
        if kind != "JobSet":
            continue
        replicated, job, pod = job_and_pod(value)
        chips = int(pod["containers"][0]["resources"]["limits"]["google.com/tpu"])
        shape = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        product = 1
        for axis in shape:
            product *= int(axis)
        assert job["parallelism"] == job["completions"] == product // chips
        assert replicated["replicas"] == 1
        longest = f"{name}-{replicated['name']}-0-{job['completions'] - 1}-abcde"
        assert len(longest) <= 63
        labels = {**pod["nodeSelector"], **value["metadata"]["labels"]}
        assert all(isinstance(label, str) for label in labels.values())


def test_an_island_waits_in_kueues_queue(config):
    labels = jobset(config, queue="tpus")["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "tpus"
    assert "kueue.x-k8s.io/queue-name" not in jobset(config)["metadata"]["labels"]


def test_each_part_is_an_account_of_its_own(config):
    account, own = "islands@p.iam", "coordinator@p.iam"
    made = rendered(config, service_account=account, coordinator_account=own)
    for name, expected in (("coordinator", own), ("v5p", account), ("v6e-b", account)):
        metadata = made["ServiceAccount", f"two-{name}"]["metadata"]
        assert metadata["annotations"] == {"iam.gke.io/gcp-service-account": expected}
    pods = [made["Job", "two-coordinator"]["spec"]["template"]["spec"]]
    pods += [job_and_pod(made["JobSet", f"two-{name}"])[2] for name in ("v5p", "v6e-b")]
    for pod, name in zip(pods, ("coordinator", "v5p", "v6e-b"), strict=True):
        assert pod["serviceAccountName"] == f"two-{name}"
        assert pod["automountServiceAccountToken"] is False
        secrets = [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
        assert secrets == [f"two-{name}-certificates"]


def test_only_its_own_pods_reach_an_islands_ports(config):
    made = rendered(config)
    for name, part in (("two-v5p", "v5p"), ("two-v6e-b", "v6e.b")):
        policy = made["NetworkPolicy", name]["spec"]
        labels = job_and_pod(made["JobSet", name])[1]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"] == labels
        assert labels["diloco-part"] == part
        assert policy["ingress"] == [
            {"from": [{"podSelector": {"matchLabels": labels}}]}
        ]
    (rule,) = made["NetworkPolicy", "two-coordinator"]["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"diloco-run": "two"}}}]


def test_only_the_coordinators_pod_is_on_its_node(config, cloud, launch):
    pod = rendered(config)["Job", "two-coordinator"]["spec"]["template"]["spec"]
    launch("gke")
    taint = cloud.things["node pool"]["two-coordinator"]["--node-taints"]
    (tolerated,) = pod["tolerations"]
    assert taint == f"{tolerated['key']}={tolerated['value']}:NoSchedule"
    (container,) = pod["containers"]
    # n2-highmem-16.
    assert container["resources"]["requests"] == {"cpu": "13", "memory": "102Gi"}


# ---- several clusters ------------------------------------------------------------


def test_a_coordinator_is_reached_from_other_clusters(config):
    made = rendered(config, **ELSEWHERE)
    service = made["Service", "two-coordinator"]
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["loadBalancerIP"] == "10.20.0.9"
    annotations = service["metadata"]["annotations"]
    assert annotations["networking.gke.io/load-balancer-type"] == "Internal"
    key = "networking.gke.io/internal-load-balancer-allow-global-access"
    assert annotations[key] == "true"
    (rule,) = made["NetworkPolicy", "two-coordinator"]["spec"]["ingress"]
    assert {"ipBlock": {"cidr": "10.0.0.0/8"}} in rule["from"]

    def dials(name):
        script = job_and_pod(made["JobSet", name])[2]["containers"][0]["command"][-1]
        return script.partition("--coordinator ")[2].split()[0]

    assert dials("two-v6e-b") == "10.20.0.9:7077"
    assert dials("two-v5p") == "two-coordinator.default.svc:7077"
    assert "loadBalancerIP" not in str(rendered(config)["Service", "two-coordinator"])
    named = rendered(config, **{**ELSEWHERE, "coordinator_address": "here.example"})
    assert "loadBalancerIP" not in named["Service", "two-coordinator"]["spec"]


def test_each_cluster_gets_what_its_islands_need(cloud, launch, tmp_path):
    assert launch("gke", namespace="train", **ELSEWHERE) == 0
    contexts = {}
    for call in cloud.changes():
        if call[0] != "kubectl":
            continue
        (context,) = [a for a in call if a.startswith("--context=")]
        if call[1] == "wait":
            continue
        what = call[4] if call[3] == "generic" else call[3]
        contexts.setdefault(context.rpartition("_")[2], []).append(
            what.rpartition("/")[2]
        )
    assert contexts == {
        "tpus": [
            *("train", "two-coordinator-certificates", "two-v5p-certificates"),
            *("config.yaml", "disk.yaml", "begin.yaml"),
            *("coordinator.yaml", "two-v5p.yaml"),
        ],
        "far": ["train", "two-v6e-b-certificates", "config.yaml", "two-v6e-b.yaml"],
    }
    pools = cloud.things["node pool"]
    assert pools["two-v6e-b"]["--location"] == "us-central1"
    assert pools["two-v6e-b"]["--cluster"] == "far"
    # The certificate knows the address.
    pem = (tmp_path / "run/certificates/coordinator.pem").read_bytes()
    assert "10.20.0.9" in names_in(pem)


def names_in(pem):
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in names.value]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"coordinator_address": ""}, "coordinator_address is empty, and v6e.b run in"),
        ({"clusters": {"v6e.b": "far"}}, "write 'LOCATION/CLUSTER' or"),
        ({"clusters": {"v6e": "a/b"}}, "the islands are v5p, v6e.b"),
        (
            {"clusters": {"v6e.b": "europe-west4/far"}},
            "'us-central1-b' is outside launch.clusters.v6e.b = 'europe-west4/far'",
        ),
    ],
)
def test_wrong_clusters_are_refused(config, changed, said):
    if "v6e" in changed.get("clusters", {}):
        changed = {**changed, "zones": config.launch.zones}
    with pytest.raises(ConfigError) as refused:
        rendered(config, **{**ELSEWHERE, **changed})
    assert said in str(refused.value)


def test_an_island_falls_back_over_zones(cloud, launch, config):
    zones = {"v5p": "us-east5-a,us-east5-c", "v6e.b": "us-east5-b"}
    launch("gke", zones=zones)
    pools = cloud.things["node pool"]
    assert pools["two-v5p"]["--node-locations"] == "us-east5-a"
    assert pools["two-v5p-1"]["--node-locations"] == "us-east5-c"
    made = jobset(config, "two-v5p", zones=zones)
    selector = job_and_pod(made)[2]["nodeSelector"]
    label = pools["two-v5p-1"]["--node-labels"]
    assert label == "diloco-island=two-v5p"
    assert selector["diloco-island"] == "two-v5p"
    assert "cloud.google.com/gke-nodepool" not in selector
    # All of its pods in the pool of one zone.
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert made["metadata"]["annotations"][key] == "cloud.google.com/gke-nodepool"


def test_other_islands_may_fetch_from_an_island_that_offers_its_anchors(config):
    offers = ",".join(f"host-{host}.pods:7301" for host in range(4))
    islands = {
        **config.islands,
        "v6e.b": dataclasses.replace(config.islands["v6e.b"], offers=offers, hosts=4),
    }
    made = rendered(dataclasses.replace(config, islands=islands))
    own, offered = made["NetworkPolicy", "two-v6e-b"]["spec"]["ingress"]
    assert "ports" not in own
    assert offered["ports"] == [{"protocol": "TCP", "port": 7301}]
    assert {"podSelector": {"matchLabels": {"diloco-run": "two"}}} in offered["from"]
    (only_own,) = made["NetworkPolicy", "two-v5p"]["spec"]["ingress"]
    assert "ports" not in only_own
