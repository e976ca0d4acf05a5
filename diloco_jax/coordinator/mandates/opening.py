"""Open the object of the mandate where `placement.mandate` says that it is."""

from __future__ import annotations

from collections.abc import Callable

from diloco_jax.coordinator.mandates.bucket import BUCKET, BucketStore
from diloco_jax.coordinator.mandates.folder import FolderStore
from diloco_jax.coordinator.mandates.kubernetes import KUBERNETES, KubernetesStore
from diloco_jax.coordinator.mandates.store import MandateStore
from diloco_jax.errors import ConfigError
from diloco_jax.files import absolute, is_bucket


def open_store(where: str) -> MandateStore:
    """Return the object at `placement.mandate`. Raises ConfigError if that names
    none."""
    for prefix, opened in OPENED.items():
        if where.startswith(prefix):
            return opened(where)
    if is_bucket(where):
        raise ConfigError(
            f"placement.mandate = {where!r}: buckets are those of gs://; give "
            f"gs://BUCKET/OBJECT, kubernetes:NAMESPACE/NAME, or a folder that both "
            f"coordinators see"
        )
    return FolderStore(absolute(where))


OPENED: dict[str, Callable[[str], MandateStore]] = {
    BUCKET: BucketStore,
    KUBERNETES: KubernetesStore.of_this_pod,
}
