"""A launch on GKE, as plain values."""

import yaml

from diloco_jax.launch.gke import deployment
from diloco_jax.launch.spec import make_spec

NOW = 1_800_000_000


def changed(config, workers=1, **settings):
    """The config with another number of workers, and other settings of its launch."""
    fields = {f"launch.{name}": value for name, value in settings.items()}
    return config.replace({"workers": workers, **fields})


def rendered(config, now=NOW, source="", **settings):
    """All objects of a launch by kind and name, read back from its files."""
    spec = make_spec(changed(config, **settings), "two.py", "gke", source)
    files = deployment(spec, "certificates", "folder", now).files
    return {
        (made["kind"], made["metadata"]["name"]): made
        for text in files.values()
        for made in yaml.safe_load_all(text)
    }


def job_and_pod(made):
    """The Job in a JobSet, and its pod; or of a Job itself."""
    if made["kind"] == "JobSet":
        (replicated,) = made["spec"]["replicatedJobs"]
        made = replicated["template"]
    return made["spec"], made["spec"]["template"]["spec"]


def container_script(made):
    """Scripts that the pods of a Job or a JobSet run."""
    (container,) = job_and_pod(made)[1]["containers"]
    assert container["command"][:2] == ["/bin/bash", "-c"]
    return container["command"][2]
