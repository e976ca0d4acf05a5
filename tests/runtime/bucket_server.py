"""`python bucket_server.py PORT SECONDS`: a bucket named "bucket" at this machine.

gcp-storage-emulator, with what it leaves out and tensorstore builds upon: every write
makes a new generation, and requests may be about one generation only.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

generations = itertools.count(1)
lock = threading.Lock()
make_resource = objects._make_object_resource


def make_with_generation(*arguments: Any, **options: Any) -> dict[str, Any]:
    """An object's metadata."""
    made: dict[str, Any] = make_resource(*arguments, **options)
    return {**made, "generation": str(next(generations))}


def conditional(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler, where the object has the generation that is asked for."""

    def handle(request: Any, response: Any, storage: Any, *rest: Any) -> None:
        (name,) = request.query.get("name", [request.params.get("object_id", "")])
        if request.query.get("uploadType") == ["multipart"]:
            name = name or request.data["meta"]["name"]
        with lock:
            try:
                found = storage.get_file_obj(request.params["bucket_name"], name)
                generation = str(found["generation"])
            except NotFound:
                generation = "0"
            (wanted,) = request.query.get("ifGenerationMatch", [generation])
            (other,) = request.query.get("ifGenerationNotMatch", [""])
            if wanted != generation:
                response.status = HTTPStatus.PRECONDITION_FAILED
            elif other == generation:
                response.status = HTTPStatus.NOT_MODIFIED
            else:
                handler(request, response, storage, *rest)
                if handler is not objects.insert:
                    response["x-goog-generation"] = generation

    return handle


def main() -> None:
    """Serves for so many seconds at most."""
    port, seconds = sys.argv[1:]
    objects._make_object_resource = make_with_generation
    guarded = {objects.get, objects.download, objects.insert, objects.delete}
    server.HANDLERS = tuple(
        (
            path,
            {
                method: conditional(handler) if handler in guarded else handler
                for method, handler in methods.items()
            },
        )
        for path, methods in server.HANDLERS
    )
    emulator = server.create_server(
        "127.0.0.1", int(port), in_memory=True, default_bucket="bucket"
    )
    emulator.start()
    time.sleep(float(seconds))


if __name__ == "__main__":
    main()
