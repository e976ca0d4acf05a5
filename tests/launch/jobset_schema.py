"""The published schema of JobSets, where it is present."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

VARIABLE = "DILOCO_JOBSET_CRD"
"""Names the file; otherwise it lies beside the repository."""
BESIDE = Path(__file__).parents[3] / "shared" / "data" / "jobset_crd.yaml"


def path() -> Path:
    """Where the CustomResourceDefinition is, if it is present."""
    return Path(os.environ.get(VARIABLE) or BESIDE)


def load() -> dict[str, Any]:
    """JSON schema of a JobSet that refuses unknown fields, as a cluster drops them."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition = yaml.load(path().read_text(), Loader=loader)
    (version,) = definition["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    # The cluster's own, which a custom resource's schema leaves out.
    metadata = {"name", "namespace", "labels", "annotations"}
    schema["properties"]["metadata"] = {
        "type": "object",
        "properties": {name: {} for name in metadata},
    }
    _close(schema)
    return schema


def _close(schema: Any) -> None:
    """Lets objects have only the fields that they are said to have."""
    if isinstance(schema, list):
        for item in schema:
            _close(item)
    if not isinstance(schema, dict):
        return
    if "properties" in schema and not schema.get(
        "x-kubernetes-preserve-unknown-fields"
    ):
        schema.setdefault("additionalProperties", False)
    for value in schema.values():
        _close(value)
