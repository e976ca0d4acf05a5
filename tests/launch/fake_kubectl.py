"""A `kubectl` that knows the commands which `diloco launch` uses; see `fake_gcloud`.

Objects are kept in FAKE_CLOUD/objects.json by "kind/name". Files are read as the real
command reads them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import yaml

WIDE = {"--context", "--namespace"}
FLAGS = {
    "get": ({"-o"}, {"--ignore-not-found"}),
    "apply": ({"-f"}, {"--server-side"}),
    "create": ({"--from-file"}, set()),
    "label": (set(), set()),
    "delete": (set(), {"--ignore-not-found"}),
    "wait": ({"--for", "--timeout"}, set()),
    "logs": (
        {"--selector", "--container", "--tail", "--max-log-requests"},
        {"--prefix"},
    ),
    "cp": ({"--container"}, set()),
    "exec": ({"--container"}, set()),
}
KINDS = {
    *("configmap", "secret", "namespace", "service", "job", "jobset", "pod"),
    *("persistentvolumeclaim", "poddisruptionbudget", "networkpolicy"),
    "serviceaccount",
}

COMPLETE = {"type": "Complete", "status": "True"}


class UsageError(Exception):
    """A command line that kubectl does not take."""


def main(arguments: list[str]) -> int:
    """Runs one command line."""
    folder = Path(os.environ["FAKE_CLOUD"])
    with (folder / "calls.jsonl").open("a") as calls:
        print(json.dumps(["kubectl", *arguments]), file=calls)
    try:
        verb, names, flags = parse(arguments)
    except UsageError as error:
        return fail(str(error))
    failures = json.loads((folder / "failures.json").read_text())
    for begin, (code, text) in failures.items():
        if f"kubectl {' '.join(arguments)}".startswith(begin):
            print(text, file=sys.stderr)
            return code
    return act(folder / "objects.json", verb, names, flags)


def parse(arguments: list[str]) -> tuple[str, list[str], dict[str, list[str]]]:
    """The verb, names and flags; raises UsageError."""
    verb, *words = arguments
    if verb not in FLAGS:
        raise UsageError(f'unknown command "{verb}" for "kubectl"')
    values, switches = FLAGS[verb][0] | WIDE, FLAGS[verb][1]
    names: list[str] = []
    flags: dict[str, list[str]] = {}
    while words:
        word = words.pop(0)
        flag, given, value = word.partition("=")
        if word == "--" and verb == "exec":
            break
        if not word.startswith("-"):
            names.append(word)
        elif flag in switches and not given:
            flags[flag] = [""]
        elif flag in values and (given or words):
            flags.setdefault(flag, []).append(value if given else words.pop(0))
        else:
            raise UsageError(f"unknown flag: {word}")
    return verb, names, flags


def act(path: Path, verb: str, names: list[str], flags: dict[str, list[str]]) -> int:
    """Changes or shows what there is in the cluster of the context."""
    everything = json.loads(path.read_text())
    # Those of the cluster `tpus` have bare names.
    cluster = "".join(flags.get("--context", [])).rpartition("_")[2]
    prefix = "" if cluster in ("tpus", "diloco") else f"{cluster}:"
    objects = {
        key.removeprefix(prefix): made
        for key, made in everything.items()
        if (":" in key) == bool(prefix) and key.startswith(prefix)
    }
    code = act_on(objects, verb, names, flags)
    others = {
        key: made
        for key, made in everything.items()
        if (":" in key) != bool(prefix) or not key.startswith(prefix)
    }
    mine = {f"{prefix}{key}": made for key, made in objects.items()}
    path.write_text(json.dumps({**others, **mine}))
    return code


def act_on(
    objects: dict, verb: str, names: list[str], flags: dict[str, list[str]]
) -> int:
    """The same for one cluster's objects."""
    if verb == "apply":
        for file in flags["-f"]:
            if file.startswith("https://"):
                continue
            for made in yaml.safe_load_all(Path(file).read_text()):
                key = f"{made['kind'].lower()}/{made['metadata']['name']}"
                objects[key] = made
                print(f"{key} configured")
    elif verb == "create":
        *kind, name = names
        files = {}
        for file in flags.get("--from-file", []):
            if not Path(file).is_file():
                return fail(f"error reading {file}: no such file or directory")
            files[Path(file).name] = len(Path(file).read_bytes())
        if f"{kind[0]}/{name}" in objects:
            return fail(f"{kind[0]} {name!r} already exists")
        objects[f"{kind[0]}/{name}"] = {"data": files}
    elif verb == "get":
        return get(objects, names, flags)
    elif verb == "delete":
        kinds, name = names
        for kind in kinds.split(","):
            if kind not in KINDS:
                return fail(f"the server doesn't have a resource type {kind!r}")
            if objects.pop(f"{kind}/{name}", None) is None:
                if "--ignore-not-found" not in flags:
                    return fail(f'{kind} "{name}" not found')
            else:
                print(f'{kind} "{name}" deleted')
    elif verb in ("wait", "exec"):
        name = names[0]
        if name not in objects:
            return fail(f'"{name}" not found')
        if verb == "exec":
            print(json.dumps({"phase": "running"}))
        elif name.startswith("job/"):
            objects[name]["status"] = {"conditions": [COMPLETE]}
    elif verb == "label":
        kind, name, label = names
        key, _, value = label.partition("=")
        objects[f"{kind}/{name}"].setdefault("metadata", {})["labels"] = {key: value}
    elif verb == "cp":
        pod = names[0].partition(":")[0]
        if f"pod/{pod}" not in objects:
            return fail(f'pods "{pod}" not found')
    elif verb == "logs":
        print(f"logs of {names or flags['--selector']}")
    return 0


def get(objects: dict, names: list[str], flags: dict[str, list[str]]) -> int:
    """Prints a name, or what the one JSONPath that is known asks for."""
    kind, name = names
    if kind not in KINDS:
        return fail(f"the server doesn't have a resource type {kind!r}")
    found = objects.get(f"{kind}/{name}")
    if found is None:
        return 0 if "--ignore-not-found" in flags else fail(f'"{name}" not found')
    labels = found.get("metadata", {}).get("labels", {})
    shown = {
        "": "",
        " {.metadata.labels.diloco-content}": labels.get("diloco-content", ""),
        " {.status.terminalState}": found.get("status", {}).get("terminalState", ""),
        ' {.status.conditions[?(@.status=="True")].type}': " ".join(ended(found)),
    }
    output = flags["-o"][0].removeprefix("jsonpath={.metadata.name}")
    if output not in shown:
        return fail(f"unknown output {output!r}")
    print(name, shown[output])
    return 0


def ended(job: dict) -> list[str]:
    """Types of a job's conditions that are true."""
    conditions = job.get("status", {}).get("conditions", [])
    return [c["type"] for c in conditions if c["status"] == "True"]


def fail(text: str) -> int:
    """As kubectl says it."""
    print(f"error: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
