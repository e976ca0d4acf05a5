"""The mandate as a Lease of Kubernetes, which people can look at with kubectl.

The API server refuses a write at another resourceVersion than the object's. The
contents are an annotation; holder, duration and time of the spec are for people, and
nobody here compares times of day.
"""

from __future__ import annotations

import datetime
import json
import re
import ssl
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

from diloco_jax.coordinator.mandates.store import StoreError, decode, encode
from diloco_jax.errors import ConfigError
from diloco_jax.protocol.standby.mandate import NO_GENERATION, Mandate

KUBERNETES = "kubernetes:"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token and the authority of its service account."""
SERVER = "https://kubernetes.default.svc"
ANNOTATION = "diloco-jax/mandate"
NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"


class KubernetesStore:
    """See `store.MandateStore`."""

    def __init__(
        self,
        where: str,
        server: str = SERVER,
        token: Path | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """where: kubernetes:NAMESPACE/NAME. token: read anew each time, since the
        kubelet renews it."""
        found = re.fullmatch(f"{KUBERNETES}({NAME})/({NAME})", where)
        if found is None:
            raise ConfigError(
                f"placement.mandate = {where!r} names no Lease; give "
                f"kubernetes:NAMESPACE/NAME"
            )
        self._where = where
        self._namespace, self._name = found[1], found[3]
        self._url = (
            f"{server}/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"
        )
        self._token, self._context = token, context

    @classmethod
    def of_this_pod(cls, where: str) -> KubernetesStore:
        """Return the store with the service account of this pod. Raises ConfigError
        outside of a pod."""
        authority = ACCOUNT / "ca.crt"
        if not authority.exists():
            raise ConfigError(
                f"placement.mandate = {where!r}: {authority} is missing, so this is no "
                f"pod with a service account; give gs://BUCKET/OBJECT, or start the "
                f"coordinator in the cluster, with leave to get, create and update "
                f"leases"
            )
        context = ssl.create_default_context(cafile=str(authority))
        return cls(where, token=ACCOUNT / "token", context=context)

    def read(self, timeout_s: float) -> tuple[str, Mandate | None]:
        """Return the Lease's resourceVersion and mandate."""
        status, lease = self._call("GET", f"/{self._name}", None, timeout_s)
        if status == HTTPStatus.NOT_FOUND:
            return NO_GENERATION, None
        metadata = lease["metadata"]
        content = metadata.get("annotations", {}).get(ANNOTATION)
        if content is None:
            raise StoreError(
                f"{self._where} is a Lease of something else: it has no annotation "
                f"{ANNOTATION}; give another name"
            )
        return str(metadata["resourceVersion"]), decode(content, self._where)

    def write(self, mandate: Mandate, generation: str, timeout_s: float) -> str | None:
        """Create the Lease, or replace it at this resourceVersion."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        metadata: dict[str, Any] = {
            "name": self._name,
            "namespace": self._namespace,
            "annotations": {ANNOTATION: encode(mandate).decode()},
        }
        if generation:
            metadata["resourceVersion"] = generation
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": mandate.holder,
                "leaseTransitions": mandate.reign - 1,
                "renewTime": now.replace("+00:00", "Z"),
            },
        }
        method, path = ("PUT", f"/{self._name}") if generation else ("POST", "")
        status, written = self._call(method, path, lease, timeout_s)
        if status == HTTPStatus.NOT_FOUND and not generation:
            raise StoreError(
                f"{self._where}: there is no namespace {self._namespace}; make it"
            )
        if status in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
            return None
        return str(written["metadata"]["resourceVersion"])

    def _call(
        self, method: str, path: str, body: Any, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the object. Raises StoreError for other statuses than
        those that the callers know."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.read_text().strip()}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(
                request, timeout=timeout_s, context=self._context
            ) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(1000).decode(errors="replace")
            if error.code in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                return error.code, {}
            raise StoreError(
                f"{self._where}: {method} was answered {error.code}: {text}; the "
                f"service account must be allowed to get, create and update leases "
                f"in namespace {self._namespace}"
            ) from error
