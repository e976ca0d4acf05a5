"""Wrong inputs, and what `diloco` answers: the exit code and pieces of the message.

A row names what the message must hold: the field, file or peer, both values (the one
given, and the one that it does not fit), and the remedy. `lacks` says which of these
today's message has not. The folder in which a row runs is that of `FILES`.
"""

from __future__ import annotations

from typing import NamedTuple

TWO = """
from diloco_jax.config import *
def config():
    outer = OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.0)
    return Config(run=RunConfig(data=DataConfig(paths=("text",)), outer=outer),
                  islands={"v6e": IslandConfig(), "v5p_a": IslandConfig(batch_size=6)})
"""
CLOUD = """
from diloco_jax.config import *
def config():
    launch = LaunchConfig(
        project="my-project", name="two", image="r.example/d:1", cluster="tpus",
        location="us-east5", coordinator_zone="us-east5-a",
        zones={"v5p": "us-east5-a", "v6e": "us-east5-b"})
    return Config(launch=launch, placement=Placement(workdir="there"), islands={
        "v5p": IslandConfig(topology="v5p:2x2x2", mesh_fsdp=8),
        "v6e": IslandConfig(topology="v6e:4x4", mesh_fsdp=16, batch_size=16)})
"""
MISSPELT = """
from diloco_jax.config import *
def config():
    return Config(
        run=RunConfig(total_token=1))
"""
RECORDED = """{"run": {"model": {"d_model": 32}, "outer": {"optimizer": "sgd",
    "learning_rate": 1.0, "momentum": 0.0}}, "islands": {"a": {"batch_size": 4}}}"""
FILES = {
    "two.py": TWO,
    "cloud.py": CLOUD,
    "note.txt": "hi",
    "foreign/config.json": '{"x": 1}',
    "cut/config.json": "{",
    "field/config.json": '{"run": {"sync": {"quorun": 2}}}',
    "typed/config.json": '{"run": {"seed": "x"}}',
    "text/a.txt": "some text " * 50,
    "json/a.jsonl": '{"txt": "a"}\n',
    "half/a.jsonl": '{"text": "a"}\n{"text"\n',
    "bytes/a.txt": "a\0b",
    "bare.py": "",
    "three.py": "def config(): return 3",
    "divides.py": "def config():\n  return 1 / 0",
    "imports.py": "\nimport nonsense_xyz",
    "syntax.py": "\ndef config(:",
    "exits.py": "raise SystemExit(0)",
    "misspelt.py": MISSPELT,
    "nothing.py": TWO.replace('{"v6e"', '{} and {"v6e"'),
    "recorded/config.json": RECORDED,
}


class Wrong(NamedTuple):
    """A command line, what the answer holds, and how the process ends."""

    line: str
    holds: tuple[str, ...]
    code: int = 2
    lacks: str = ""


def wrong(line: str, *holds: str, code: int = 2, lacks: str = "") -> Wrong:
    """Return a row."""
    return Wrong(line, holds, code, lacks)


ADDRESS = ("is not HOST:PORT with a port from 0 to 65535", "write 10.0.0.1:7077")
NOT_LOOPBACK = ("address 10.0.0.1:7 is not loopback", "`diloco certs`", "--insecure")
NO_FOLDER = ("'nowhere' is neither a folder nor HOST:PORT", "give a run's workdir")
NO_FILE = ("no config file 'tow.py'", "did you mean 'two.py'", ".py file", "quickstart")

COMMANDS = [
    wrong("rnu", "no command 'rnu'", "did you mean 'run'", "there are run, coord"),
    wrong("run", "CONFIG comes first", ".py file", "quickstart"),
    wrong("run --workdir x", "CONFIG comes first", "found '--workdir'"),
    wrong("run two.py extra", "Unrecognized options: extra", "--help"),
    wrong("status", "Missing from diloco status", "HOST:PORT or WORKDIR"),
    wrong("status empty --jsn", "options: --jsn", "Perhaps you meant", "--json"),
    wrong("eval", "Missing from diloco eval", "WORKDIR"),
    wrong("dashboard h:7000", "h:7000 holds no run", "run.json", "give the workdir"),
    wrong("simulate godput", "no simulation 'godput'", "mean 'goodput'", "there are"),
    wrong("data", "diloco data prepare OUT SOURCES... is what there is"),
    wrong("data mix", "data prepare OUT SOURCES... is what there is", "found 'mix'"),
    wrong("completion csh", "choice 'csh'", "('bash', 'zsh', 'fish')", lacks="field"),
]

CONFIG_FILES = [
    wrong("run tow.py", *NO_FILE),
    wrong("run quikstart", "config file 'quikstart'", "did you mean 'quickstart'"),
    wrong("run note.txt", "'note.txt' is neither a .py file", "configs/*.py"),
    wrong("run empty", "no config file 'empty'", ".py file", "quickstart"),
    wrong("run bare.py", "bare.py defines no function config()", "add `def config()"),
    wrong("run three.py", "config() of three.py returned int", "config.Config"),
    wrong("run divides.py", "divides.py failed in line 2: ZeroDivisionError"),
    wrong("run imports.py", "imports.py cannot be executed in line 2", "nonsense_xyz"),
    wrong("run syntax.py", "syntax.py cannot be executed: SyntaxError", "line 2"),
    wrong("run exits.py", "exits.py cannot be executed in line 1: SystemExit: 0"),
    wrong(
        "run misspelt.py",
        "misspelt.py failed in line 5: RunConfig has no field 'total_token'",
        "did you mean 'total_tokens'",
    ),
    wrong("run nothing.py", "islands is empty", "name at least one island"),
    wrong(
        "run foreign/config.json",
        "foreign/config.json has an unknown field x",
        "remove or rename it",
    ),
    wrong("run cut/config.json", "cut/config.json cannot be read as JSON"),
    wrong("run field/config.json", "run.sync.quorun", "did you mean 'quorum'"),
    wrong("run typed/config.json", "$.run.seed", "Expected `int`, got `str`"),
]

VALUES = [
    wrong(
        "run two.py --sync.quorun 2",
        "Unrecognized options: --sync.quorun",
        "Perhaps you meant",
        "--sync.quorum",
    ),
    wrong("run two.py --total-tokens many", "--total-tokens: many is not a whole"),
    wrong("run two.py --total-tokens", "'--total-tokens'", "Expected 1 values"),
    wrong("run two.py --total-tokens 0", "total_tokens = 0; it must be at least 1"),
    wrong(
        "run two.py --sync.quorum 3",
        "sync.quorum = 3",
        "2 islands (v6e, v5p_a)",
        "lower sync.quorum or add islands",
    ),
    wrong(
        "run two.py --sync.grace-window aliek",
        "'aliek' for argument '--sync.grace-window'",
        "('alike', 'overlap')",
    ),
    wrong(
        "run two.py --sync.codec-up int3",
        "sync.codec_up = 'int3'",
        "did you mean 'int8'",
        "choose from f32, bf16, int8, int4, int2",
    ),
    wrong(
        "run two.py --sync.codec-up int2",
        "sync.codec_up = 'int2' with inner.optimizer = 'adamw'",
        "of the loss, and a codec may cost 0.5 %",
        "set sync.codec_up = 'int4'",
    ),
    wrong(
        "run two.py --sync.merge men",
        "sync.merge = 'men'",
        "did you mean 'mean'",
        "choose from rda, mean, clipped_mean, trimmed_mean",
    ),
    wrong(
        "run two.py --sync.merge nofile.py:f",
        "sync.merge = 'nofile.py:f': there is no file",
        "correct the path",
    ),
    wrong(
        "run two.py --outer.optimizer nestrov",
        "outer.optimizer = 'nestrov'",
        "choose sgd, nesterov",
    ),
    wrong(
        "run two.py --model.num-kv-heads 4",
        "model.num_heads = 6",
        "model.num_kv_heads = 4",
        "choose a multiple",
    ),
    wrong(
        "run two.py --data.digest x",
        "data.digest = x",
        "has 23cf4afae86726df",
        "give the run's text (--data.paths)",
    ),
    wrong("run two.py --data.paths nosuch", "data.paths", "nosuch does not", "name a"),
    wrong("run two.py --data.paths empty", "data.paths", "empty is empty", "name a"),
    wrong("run two.py --data.paths bytes", "is not text: a NUL byte", "leave it out"),
    wrong(
        "run two.py --sequence-length 500",
        "491 bytes",
        "sequence_length = 500",
        "(data.paths) or lower",
    ),
]

ISLANDS = [
    wrong(
        "run two.py --islands.v6.batch-size 2",
        "options: --islands.v6.batch-size",
        "Perhaps you meant",
        "--islands.v6e.batch-size",
    ),
    wrong(
        "run two.py --islands.v6e.mesh-fsdp 3",
        "islands.v6e.batch_size = 8",
        "1 * 3 * 1 * 1 = 3",
        "choose a multiple of 3",
    ),
    wrong(
        "run two.py --islands.v6e.mesh-expert 2",
        "islands.v6e.mesh_expert = 2 does not divide",
        "model.experts = 0",
        "choose a divisor, or spread by mesh_data or mesh_fsdp",
    ),
    wrong(
        "run two.py --model.experts 4 --model.experts-per-token 5",
        "model.experts_per_token = 5",
        "model.experts = 4",
        "at most as many",
    ),
    wrong(
        "run two.py --islands.v6e.hosts 3",
        "islands.v6e.hosts = 3 does not divide 1",
        "choose a divisor of 1, or a larger mesh",
    ),
    wrong(
        "run two.py --islands.v6e.attention splash --sequence-length 100",
        "islands.v6e.attention = 'splash'",
        "sequence_length = 100",
        "multiple of 128",
        "'dot_product'",
    ),
    wrong(
        "island two.py --workdir w --name v6e",
        "--coordinator is missing",
        "--help",
    ),
    wrong("island two.py --workdir w --coordinator h:1", "--name is missing", "--help"),
    wrong(
        "island two.py --workdir w --name v6 --coordinator h:1",
        "no island 'v6'",
        "did you mean 'v6e'",
        "it has v6e, v5p_a",
    ),
    wrong(
        "island two.py --workdir w --name v6e --coordinator foo",
        "--coordinator: address 'foo'",
        *ADDRESS,
    ),
    wrong(
        "island two.py --workdir w --name v6e --coordinator 10.0.0.1:7", *NOT_LOOPBACK
    ),
    wrong(
        "island two.py --workdir w --name v6e --coordinator h:1 --incarnation -1",
        "--incarnation -1",
        "counted from 1",
        "leave it out",
    ),
    wrong(
        "island two.py --workdir w --name v6e --coordinator h:1 --world h:1",
        "--world h:1",
        "'v6e' has hosts = 1",
        "leave it out, or set islands.v6e.hosts",
    ),
    wrong(
        "island two.py --workdir w --name v6e --coordinator h:1 --host-index 1",
        "--host-index 1",
        "'v6e' has hosts = 1",
        "one from 0 to 0",
    ),
    wrong(
        "island two.py --workdir w --name v6e --coordinator h:1 --islands.v6e.hosts 2"
        " --islands.v6e.mesh-data 2 --world nonsense",
        "--world: address 'nonsense'",
        *ADDRESS,
    ),
]

PLACEMENT = [
    wrong(
        "run two.py --workdir gs://b/run",
        "placement.workdir = 'gs://b/run'",
        "no folder of this machine",
        "--checkpoints gs://b/run",
    ),
    wrong(
        "run two.py --checkpoints ftp://x",
        "placement.checkpoints = 'ftp://x'",
        "begins with gs:// or s3://",
        "give one of them",
    ),
    wrong("run two.py --workdir note.txt", "workdir", "note.txt", "another --workdir"),
    wrong("run two.py --workdir foreign", "foreign holds another", "another --workdir"),
    wrong("run two.py --bind nonsense", "placement.bind: address 'nonsense'", *ADDRESS),
    wrong(
        "run two.py --advertise h:0",
        "placement.advertise = 'h:0'",
        "no island can dial",
        "give the port",
    ),
    wrong("run two.py --advertise x", "placement.advertise: address 'x'", *ADDRESS),
    wrong(
        "run two.py --certificates none",
        "none/ca.pem (No such file",
        "`diloco certs`",
    ),
    wrong(
        "run two.py --metrics-bind nonsense",
        "placement.metrics_bind: address 'nonsense'",
        *ADDRESS,
    ),
    wrong(
        "run two.py --sinks tensrboard",
        "placement.sinks has 'tensrboard'",
        "did you mean 'tensorboard'",
        "there are tensorboard, wandb",
    ),
    wrong(
        "run two.py --workers 30",
        "placement.workers = 30",
        "24 fragments",
        "at most as many, or more sync.fragments",
    ),
    wrong(
        "run two.py --workers 2 --worker-addresses a:1",
        "placement.worker_addresses has 1",
        "placement.workers = 2",
        "one address for each",
    ),
    wrong(
        "run two.py --workers 2 --worker-addresses a:1 b:1",
        "placement.workers = 2",
        "starts all of a run on this machine",
        "start `diloco worker`",
    ),
    wrong(
        "coordinator two.py --workdir w --init --workers 2",
        "placement.workers = 2",
        "placement.worker_addresses is empty",
        "name there where each `diloco worker` runs",
    ),
    wrong(
        "worker two.py --workdir w",
        "placement.worker_addresses is empty",
        "name there where each worker runs",
    ),
    wrong("coordinator two.py", "--workdir is missing", "give the folder"),
    wrong(
        "coordinator two.py --workdir w --init --bind 0.0.0.0:7000",
        "address 0.0.0.0:7000 is not loopback",
        "`diloco certs`",
        "--insecure",
    ),
]

FAULTS = [
    wrong(
        "run two.py --faults v6e@3:kil",
        "placement.faults has 'v6e@3:kil'",
        "the forms are 'NAME@STEP:kill'",
    ),
    wrong(
        "run two.py --faults v7@3:kill",
        "placement.faults has 'v7@3:kill'",
        "known are v6e, v5p_a, coordinator",
    ),
    wrong(
        "run two.py --faults v6e@0:kill",
        "placement.faults has v6e@0",
        "counted from 1",
        "give a number above 0",
    ),
    wrong(
        "run two.py --faults v6e/2@3:kill",
        "placement.faults has v6e/2@3",
        "v6e has 1 host",
        "choose a host below 1",
    ),
    wrong(
        "chaos two.py --strikes v7@3s:kill",
        "strikes has 'v7@3s:kill'",
        "known are v6e, v5p_a, coordinator",
    ),
    wrong(
        "chaos two.py --strikes v6e@3s:kil",
        "strikes has 'v6e@3s:kil'",
        "'WHO@TIMEs:kill'",
        "kinds are kill, stop",
    ),
    wrong(
        "chaos two.py --kinds kil",
        "kinds has 'kil'",
        "did you mean 'kill'",
        "there are kill, stop",
    ),
    wrong(
        "chaos two.py --schedule nosuch",
        "schedule = 'nosuch' cannot be read",
        "one strike a line",
    ),
    wrong("chaos two.py --every-s 0", "every_s above 1, found 0"),
    wrong("chaos nosuch", "no config file 'nosuch'", "quickstart"),
    wrong("chaos empty", "empty/config.json", "give the workdir of a run"),
    wrong("chaos 10.0.0.1:7", "no config file '10.0.0.1:7'", "give the path"),
]

WEIGHTS = [
    wrong(
        "run two.py --init nosuch", "--init nosuch", "hf:DIR", "run:WORKDIR", "safeten"
    ),
    wrong(
        "run two.py --init hf:nosuch",
        "there is no",
        "nosuch/config.json",
        "give the folder of a model",
    ),
    wrong(
        "run two.py --init hf:HuggingFaceTB/SmolLM2-135M",
        "does not give it",
        "hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M",
        "--init hf:SmolLM2-135M",
    ),
    wrong("export nosuch out", "'nosuch' is neither a folder nor", "give a run's"),
    wrong("export empty out", "no empty/config.json", "give the workdir of a run"),
    wrong("export empty out --dtype int7", "'int7'", "'--dtype'", "'float32'"),
    wrong(
        "generate empty --prompt x",
        "no empty/config.json",
        "give the folder of a model",
        lacks="that a run's workdir would do",
    ),
    wrong("generate empty --prompt x --temperature=-1", "temperature = -1.0", "least"),
]

RUNS = [
    wrong("run --resume", "--resume takes the workdir"),
    wrong("run --resume nosuch", "--resume nosuch", "no such folder", "the workdir"),
    wrong("run --resume empty", "--resume empty: no run is there", "diloco run CONFIG"),
    wrong("run --resume foreign", "--resume foreign: no run is there", "diloco run"),
    wrong("run two.py --resume empty", "empty holds no run"),
    wrong("run two.py --resume nosuch", "nosuch", "there is no such folder"),
    wrong(
        "run two.py --resume empty --workdir other",
        "--workdir other with --resume empty",
        "leave --workdir out",
    ),
    wrong("status nowhere", *NO_FOLDER),
    wrong("dashboard nowhere", "nowhere holds no run", "give the workdir of a run"),
    wrong("status h:x", "address 'h:x'", *ADDRESS),
    wrong("status 10.0.0.1:7", *NOT_LOOPBACK),
    wrong("status 127.0.0.1:1", "127.0.0.1:1: nothing listens", "check", code=1),
    wrong("status empty", "empty has neither coordinator.address", "no run was star"),
    wrong("admit x", "--coordinator is missing", "HOST:PORT", "workdir"),
    wrong("admit ../x --coordinator h:1", "island name '../x'", "rename it"),
    wrong("eval empty", "no empty/config.json", "give the workdir of a run"),
    wrong(
        "eval foreign",
        "foreign/config.json has an unknown field x",
        lacks="that no run is there: the remedy is to edit what is no run's file",
    ),
]

STUDIES = [
    wrong("fork", "WORKDIR comes first", "give the workdir of a run"),
    wrong("fork empty --at 3", "no empty/config.json", "give the workdir of a run"),
    wrong("fork recorded", "at = 0", "give --at, the last merge that the fork sha"),
    wrong("fork recorded --at 3", "recorded has no tape.jsonl", "give the workdir"),
    wrong(
        "fork recorded --at 3 --model.d-model 64",
        "model.d_model: 64 in the fork, 32 in the run",
        "leave --model.d_model out",
        "recorded DIR --cycle",
        "--init hf:DIR",
    ),
    wrong("fork recorded --at 3 --skip-merges 2 5", "at = 3, skip_merges = 2 5"),
    wrong("fork recorded --at 3 --without b", "no island 'b'", "it has a"),
    wrong("emulate two.py --step-spread 2", "step_spread = 2.0", "at most 1"),
    wrong("emulate two.py --line.latency-s=-1", "latency_s = -1.0", "at least 0"),
    wrong("emulate two.py --evaluate-every-tokens=-1", "tokens = -1", "at least 0"),
    wrong(
        "emulate two.py --joins v7 0 1",
        "joins has 'v7'",
        "there are v6e, v5p_a",
    ),
    wrong("emulate two.py --joins v6e 2 1", "joins.v6e = 2 to 1", "0 <= from < to"),
    wrong("simulate goodput --hours=-1", "hours = -1.0; it must be above 0"),
    wrong("simulate goodput --method elstic", "'elstic'", "'--method'", "'elastic'"),
    wrong(
        "simulate goodput --quorum 9 --islands 2",
        "quorum = 9",
        "islands = 2",
        "lower quorum or add islands",
    ),
    wrong("simulate bandwidth --params 0", "params = 0.0; it must be above 0"),
    wrong("simulate faults --seeds 0", "seeds = 0; it must be at least 1"),
    wrong("simulate faults --schedule x", "--schedule", "not a schedule", "JSON"),
]

PLANS = [
    wrong(
        "plan two.py", "islands.v6e.topology is empty", "name the slice", "'v5p:2x2x1'"
    ),
    wrong(
        "plan cloud.py --arithmetic --islands.v5p.topology v5p:2x2x3",
        "islands.v5p.topology = 'v5p:2x2x3' does not exist",
        "nearest v5p topologies are v5p:2x2x4",
    ),
    wrong(
        "plan cloud.py --arithmetic --islands.v5p.topology v9:2x2",
        "islands.v5p.topology = 'v9:2x2' is no TPU topology",
        "generation of v4, v5e, v5p, v6e, tpu7x",
    ),
    wrong(
        "plan cloud.py --arithmetic --price v9=4",
        "price = 'v9=4'",
        "a name of v4, v5e, v5p, v6e, tpu7x, coordinator, traffic",
    ),
    wrong(
        "plan cloud.py --arithmetic --price v5p=dear",
        "price = 'v5p=dear'",
        "a number of at least 0",
    ),
    wrong("rehearse two.py --max-price 5", "--max-price 5", "needs --price"),
    wrong("rehearse two.py --share 2", "share = 2", "at most 1"),
    wrong("rehearse two.py --records nosuch", "nosuch has no tape", "name the workdir"),
    wrong(
        "rehearse two.py --on gke --records w",
        "--records w starts nothing",
        "--on gke makes machines",
        "leave one of them out",
    ),
    wrong("launch two.py", "--on is missing", "--on tpu_vm, --on gke or --on sky"),
    wrong("launch two.py --on aws", "'aws' for argument '--on'", "'sky'"),
    wrong(
        "launch two.py --on gke --dry-run",
        "launch.project, launch.image, launch.coordinator_zone, launch.cluster",
        "launch.zones.v6e, launch.zones.v5p_a must be set",
        "--launch.project",
    ),
    wrong(
        "launch cloud.py --on gke --dry-run --only v5",
        "--only v5: no such part",
        "did you mean 'v5p'",
        "it has coordinator, v5p, v6e",
    ),
    wrong(
        "launch cloud.py --on gke --dry-run --launch.zones v5p=mars-1a",
        "options: --launch.zones",
        "Perhaps you meant",
        "--launch.zones.v5p",
    ),
    wrong(
        "launch cloud.py --on gke",
        "no terminal to ask on",
        "give --yes to run the commands; `diloco launch` shows them with --dry-run",
    ),
    wrong(
        "launch cloud.py --on gke --dry-run --disk",
        "--disk with --action create",
        "leave it out",
    ),
]

TEXT = [
    wrong("data prepare", "Missing from diloco data prepare", "OUT"),
    wrong("data prepare text text", "OUT", "text exists", "the name of a new folder"),
    wrong("data prepare out nosuch", "SOURCES: nosuch does not exist", "name a text"),
    wrong(
        "data prepare out json",
        "json/a.jsonl, offset 0",
        "its fields are txt; it needs 'text'",
        "give --text-field",
    ),
    wrong("data prepare out half", "half/a.jsonl, offset 14", "Expecting"),
    wrong("data prepare out bytes", "bytes/a.txt is not text", "NUL byte at offset 1"),
    wrong("data prepare gs://b/x text", "OUT: gs://b/x is a bucket", "give a folder"),
    wrong("data prepare out s3://b/in", "SOURCES: s3://b/in is a bucket", "mount it"),
    wrong("data prepare out text --text-field ''", "--text-field is empty", "give the"),
    wrong("data prepare out text --turn a", "--turn", "'a' has 0 places", "chatml"),
    wrong(
        "data prepare out text --tokenizer nosuch",
        "--tokenizer: nosuch is no file",
        "give a tokenizer.json",
    ),
    wrong("manifest nosuch", "data.paths: nosuch does not exist", "name a text file"),
    wrong("manifest empty", "data.paths: empty is empty", "name a file or folder"),
]

NEW_FILES = [
    wrong("init two.py", "two.py exists", "give another name, or delete it"),
    wrong("init mine.yaml", "'mine.yaml' is no .py file", "give one, as in my_run.py"),
    wrong("init no/mine.py", "no/mine.py", "no folder no", "make it, or give another"),
    wrong("init mine.py --like quickstrat", "'quickstrat'", "mean 'quickstart'"),
    wrong("certs note.txt --hosts a", "to note.txt: File exists", "that is writable"),
    wrong("certs keys --hosts a/b", "name 'a/b' is neither", "give it as islands dial"),
    wrong("certs keys --hosts a --days 0", "--days 0", "1 day to", "3650 days"),
    wrong("certs keys --revoke x", "--revoke x", "no certificate of that name"),
    wrong("certs keys --revoke x --add", "--revoke", "--add", "choose one of them"),
    wrong("certs keys --add --hosts a", "keys/ca.pem", "without --add it makes a new"),
]

INPUTS = [
    *COMMANDS,
    *CONFIG_FILES,
    *VALUES,
    *ISLANDS,
    *PLACEMENT,
    *FAULTS,
    *WEIGHTS,
    *RUNS,
    *STUDIES,
    *PLANS,
    *TEXT,
    *NEW_FILES,
]
