"""Weights by name, from a small hub on this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import shutil
import threading
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco_jax import ConfigError, cli
from diloco_jax.weights import first
from diloco_jax.weights.first import require_source, started_from
from diloco_jax.weights.tensor_files import INDEX, SINGLE, read_tensors

NAME, COMMIT = "someone/tiny", "a" * 40
MODEL = f"hf:hf://{NAME}@{COMMIT}"


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does, for one model and its revisions `main` and `v1`."""

    protocol_version = "HTTP/1.1"
    folder: Path
    breaks_after: int | None = None
    """Bytes of a file of weights after which the connection is cut, once."""
    asked: list[tuple[str, str]]
    """Path and Range of each download."""

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.urlparse(self.path).path
        if path.startswith("/api/models/gated/"):
            return self._say(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        if path == f"/api/models/{NAME}":
            path += "/revision/main"
        if not path.startswith((f"/api/models/{NAME}/", f"/{NAME}/resolve/")):
            missing = {"X-Error-Code": "RepoNotFound"}
            return self._say(404, {"error": "Repository not found"}, missing)
        _, _, rest = path.partition(f"{NAME}/")
        kind, _, rest = rest.partition("/")
        revision, _, file = rest.partition("/")
        if revision not in ("main", "v1", COMMIT):
            missing = {"X-Error-Code": "RevisionNotFound"}
            return self._say(404, {"error": f"Invalid rev id: {revision}"}, missing)
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        names = {path: str(path.relative_to(self.folder)) for path in files}
        if kind == "revision":
            siblings = [{"rfilename": names[one]} for one in files]
            facts = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings}
            return self._say(200, facts)
        if kind == "tree":
            tree = [
                {"type": "file", "path": names[f], "size": f.stat().st_size, "oid": "0"}
                for f in files
            ]
            return self._say(200, tree)
        return self._file(self.folder / file)

    def _file(self, path: Path) -> None:
        if not path.is_file():
            return self._say(404, {}, {"X-Error-Code": "EntryNotFound"})
        data = path.read_bytes()
        asked = self.headers.get("Range", "")
        begin = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data) - begin))
        if asked:
            span = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command == "HEAD":
            return None
        self.asked.append((str(path.relative_to(self.folder)), asked))
        if path.suffix == ".safetensors" and (most := type(self).breaks_after):
            type(self).breaks_after = None
            self.wfile.write(data[begin : begin + most])
            self.close_connection = True
            return None
        self.wfile.write(data[begin:])
        return None

    def _say(self, code, facts, headers=()) -> None:
        body = json.dumps(facts).encode()
        self.send_response(code)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(workdir, exported, tmp_path, monkeypatch):
    """The class of the hub's handler; it serves the export of a tiny run."""
    monkeypatch.setattr(Hub, "folder", workdir.parent / "export", raising=False)
    monkeypatch.setattr(Hub, "asked", [], raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    # The library reads the place of its cache as it is imported.
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_name_is_fetched_and_its_commit_kept(hub, config):
    begun = started_from(config, f"hf:{NAME}@v1")
    assert begun.run.model.weights == MODEL
    served = started_from(config, f"hf:{hub.folder}")
    assert (
        dataclasses.replace(begun.run.model, weights=served.run.model.weights)
        == served.run.model
    )
    names = [name for name, _ in hub.asked]
    assert sorted(names) == sorted(set(names)), "each file once"
    assert "model.safetensors" in names
    require_source(begun.run.model)
    assert [name for name, _ in hub.asked] == names, "what the cache has is not asked"


@pytest.mark.parametrize("several", [False, True])
def test_only_the_weights_that_are_read_are_fetched(
    several, hub, tmp_path, monkeypatch
):
    """Many a model has them once more beside, in a layout of another library."""
    folder = tmp_path / "published"
    shutil.copytree(hub.folder, folder)
    monkeypatch.setattr(hub, "folder", folder)
    single, shard = folder / SINGLE, "model-00001-of-00001.safetensors"
    (folder / "original").mkdir()
    for other in ("consolidated.safetensors", "original/model.safetensors", shard):
        shutil.copy(single, folder / other)
    where = dict.fromkeys(load_file(single), shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    if several:
        single.unlink()
    found = first._downloaded(f"hf://{NAME}@{COMMIT}", arrays=True)
    fetched = [name for name, _ in hub.asked if name.endswith(".safetensors")]
    assert fetched == [shard if several else SINGLE]
    tensors, there = read_tensors(found), read_tensors(hub.folder)
    assert tensors.keys() == where.keys()
    assert all(np.array_equal(tensors[name], there[name]) for name in where)


def test_a_name_without_a_revision_is_the_newest(hub):
    assert (first._downloaded(f"hf://{NAME}", arrays=False) / "config.json").is_file()


def test_a_download_that_was_cut_goes_on_where_it_was(hub, config, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    size = (hub.folder / "model.safetensors").stat().st_size
    hub.breaks_after = size // 2
    begun = started_from(config, f"hf:{NAME}")
    weights = [asked for name, asked in hub.asked if name == "model.safetensors"]
    assert weights[0] == ""
    begin = int(weights[1].removeprefix("bytes=").removesuffix("-"))
    assert size // 2 - 1024 <= begin <= size // 2
    assert begun.run.model.weights == MODEL


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"hf:{NAME}@v2", rf"RevisionNotFoundError.*{NAME} has no revision 'v2'"),
        ("hf:someone/other", "no folder someone/other here and no such model there"),
        ("hf:gated/model", "accept its licence there, and `hf auth login`"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(hub, config, source, message):
    with pytest.raises(ConfigError, match=message):
        started_from(config, source)


def test_without_a_network_the_command_to_fetch_it_stands_in_the_message(
    config, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    by_hand = r"`hf download someone/tiny --revision v1 --local-dir tiny`"
    with pytest.raises(ConfigError, match=rf"{by_hand} and --init hf:tiny"):
        started_from(config, f"hf:{NAME}@v1")
    assert cli.main(["run", "quickstart", "--init", f"hf:{NAME}"]) == 2
    assert "hf download someone/tiny --local-dir tiny" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_config_that_names_no_commit_is_told_which(hub, config):
    model = started_from(config, f"hf:{NAME}").run.model
    loose = dataclasses.replace(model, weights=f"hf:{NAME}")
    with pytest.raises(ConfigError, match=f"names no commit.*write '{MODEL}'"):
        require_source(loose)


def test_a_folder_of_that_name_comes_first(hub, config, tmp_path):
    (tmp_path / "someone").mkdir()
    (tmp_path / NAME).symlink_to(hub.folder)
    begun = started_from(config, f"hf:{NAME}")
    assert begun.run.model.weights == f"hf:{tmp_path / NAME}"
    assert not hub.asked
