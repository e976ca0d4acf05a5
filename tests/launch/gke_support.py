"""A launch on GKE, as plain values."""

import dataclasses

import yaml

from diloco_jax.launch.gke import deployment
from diloco_jax.launch.order import make_order

NOW = 1_800_000_000


def rendered(config, now=NOW, **settings):
    """All objects of a launch by kind and name, read back from its files."""
    launch = dataclasses.replace(config.launch, **settings)
    order = make_order(dataclasses.replace(config, launch=launch), "two.py", "gke")
    files = deployment(order, "certificates", "folder", now).files
    return {
        (made["kind"], made["metadata"]["name"]): made
        for text in files.values()
        for made in yaml.safe_load_all(text)
    }


def jobset(config, name="two-v6e-b", **settings):
    return rendered(config, **settings)["JobSet", name]


def job_and_pod(made):
    (replicated,) = made["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return replicated, job, job["template"]["spec"]


def container_script(pod):
    (container,) = pod["containers"]
    assert container["command"][:2] == ["/bin/bash", "-c"]
    return container["command"][2]
