"""A server of Leases as Kubernetes' is one, for one namespace: it knows the fields of
the API and refuses all others, as `fieldValidation=Strict` does."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

PATH = "/apis/coordination.k8s.io/v1/namespaces/team/leases"
TOKEN = "of-the-pod"
FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "metadata": {"name", "namespace", "annotations", "labels", "resourceVersion"},
    "spec": {
        "acquireTime",
        "holderIdentity",
        "leaseDurationSeconds",
        "leaseTransitions",
        "renewTime",
    },
}
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
ANNOTATION = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class Leases:
    """The objects, by name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 0

    def answer(self, method: str, name: str, body: Any) -> tuple[int, dict[str, Any]]:
        with self.lock:
            found = self.objects.get(name)
            if method == "GET":
                return (200, found) if found else (404, status("not found"))
            if wrong := refusal(body):
                return 400, status(wrong)
            given = body["metadata"]
            if method == "POST":
                if given.get("resourceVersion"):
                    return 400, status("resourceVersion may not be set on creation")
                name, found = given["name"], self.objects.get(given["name"])
                if found:
                    return 409, status("already exists")
            elif not found:
                return 404, status("not found")
            elif given.get("resourceVersion") != found["metadata"]["resourceVersion"]:
                return 409, status("the object has been modified")
            self.version += 7
            metadata = {**given, "resourceVersion": str(self.version), "uid": "u"}
            self.objects[name] = {**body, "metadata": metadata}
            return (201 if method == "POST" else 200), self.objects[name]


def refusal(body: dict[str, Any]) -> str:
    for part, known in FIELDS.items():
        given = body[part] if part else body
        if unknown := set(given) - known:
            return f"strict decoding error: unknown field {sorted(unknown)}"
    if not MICRO_TIME.fullmatch(body["spec"]["renewTime"]):
        return "renewTime is no MicroTime"
    annotations = body["metadata"]["annotations"]
    if not all(ANNOTATION.fullmatch(key) for key in annotations):
        return "an annotation's name is not valid"
    if not isinstance(body["spec"]["leaseTransitions"], int):
        return "leaseTransitions is no int32"
    return ""


def status(message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "message": message}


@contextlib.contextmanager
def leases() -> Iterator[tuple[str, Leases]]:
    """Serve; yields the URL and the objects."""
    held = Leases()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            prefix, name = PATH, self.path.removeprefix(PATH).strip("/")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                code, answer = 401, status("Unauthorized")
            elif not self.path.startswith(prefix):
                code, answer = 404, status("no such namespace")
            else:
                code, answer = held.answer(self.command, name, body)
            raw = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_PUT = do_POST = do  # noqa: N815

        def log_message(self, *arguments: Any) -> None:
            """Keep quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", held
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
