"""`python bucket_server.py PORT SECONDS`: a bucket named "bucket" at this machine.

gcp-storage-emulator, with what it leaves out. tensorstore builds upon generations: each
write makes a new one, and requests may be about one only. ArrayRecord asks for the last
bytes of an object.
"""

from __future__ import annotations

import itertools
import re
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
download = objects.download


def make_with_generation(*arguments: Any, **options: Any) -> dict[str, Any]:
    """An object's metadata."""
    made: dict[str, Any] = make_resource(*arguments, **options)
    return {**made, "generation": str(next(generations))}


def download_last(request: Any, response: Any, storage: Any, *rest: Any) -> None:
    """An object's bytes, where the last N may be asked for."""
    plain = request.get_header
    asked = re.fullmatch(r"bytes=-([0-9]+)", plain("range", None) or "")
    if asked:
        name = request.params["bucket_name"], request.params["object_id"]
        size = len(storage.get_file(*name))
        last = f"bytes={max(size - int(asked[1]), 0)}-{size - 1}"

        def get_header(key: str, default: Any = None) -> Any:
            return last if key == "range" else plain(key, default)

        request.get_header = get_header
    download(request, response, storage, *rest)


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
    objects.download = download_last  # What `objects.get` answers a download with.
    guarded = {objects.get, download, objects.insert, objects.delete}
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
