"""Wrong inputs, and what `diloco` answers: the exit code and the message.

A row names what the message must hold, in order: the field, file or peer, both values
(the one given, and the one that it does not fit), and the remedy. The folder in which a
row runs is that of `FILES`.
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
    """A command line, the answer with `...` between its pieces, and the exit code."""

    line: str
    said: str
    code: int = 2


ADDRESS = "is not HOST:PORT with a port from 0 to 65535 ... write 10.0.0.1:7077"
NOT_LOOPBACK = "address 10.0.0.1:7 is not loopback ... `diloco certs` ... --insecure"
NO_FOLDER = "'nowhere' is neither a folder nor HOST:PORT ... give a run's workdir"
NO_FILE = (
    "no config file 'tow.py' ... did you mean 'two.py' ... .py file ... quickstart"
)

COMMANDS = [
    Wrong("rnu", "no command 'rnu' ... did you mean 'run' ... there are run, coord"),
    Wrong("run", "CONFIG comes first ... .py file ... quickstart"),
    Wrong("run --workdir x", "CONFIG comes first ... found '--workdir'"),
    Wrong("run two.py extra", "Unrecognized options: extra ... --help"),
    Wrong("status", "Missing from diloco status ... HOST:PORT or WORKDIR"),
    Wrong("status empty --jsn", "options: --jsn ... Perhaps you meant ... --json"),
    Wrong("eval", "Missing from diloco eval ... WORKDIR"),
    Wrong("dashboard h:7000", "no h:7000/config.json; give the workdir of a run"),
    Wrong("simulate godput", "no simulation 'godput' ... mean 'goodput' ... there are"),
    Wrong("data", "diloco data prepare OUT SOURCES... is what there is"),
    Wrong("data mix", "data prepare OUT SOURCES... is what there is ... found 'mix'"),
    Wrong("completion csh", "choice 'csh' ... ('bash', 'zsh', 'fish')"),
]

CONFIG_FILES = [
    Wrong("run tow.py", NO_FILE),
    Wrong("run quikstart", "config file 'quikstart' ... did you mean 'quickstart'"),
    Wrong("run note.txt", "'note.txt' is neither a .py file ... configs/*.py"),
    Wrong("run empty", "no config file 'empty' ... .py file ... quickstart"),
    Wrong("run bare.py", "bare.py defines no function config() ... add `def config()"),
    Wrong("run three.py", "config() of three.py returned int ... config.Config"),
    Wrong("run divides.py", "divides.py failed in line 2: ZeroDivisionError"),
    Wrong("run imports.py", "imports.py cannot be executed in line 2 ... nonsense_xyz"),
    Wrong("run syntax.py", "syntax.py cannot be executed: SyntaxError ... line 2"),
    Wrong("run exits.py", "exits.py cannot be executed in line 1: SystemExit: 0"),
    Wrong(
        "run misspelt.py",
        "misspelt.py failed in line 5: RunConfig has no field 'total_token' ... "
        "did you mean 'total_tokens'",
    ),
    Wrong("run nothing.py", "islands is empty ... name at least one island"),
    Wrong(
        "run foreign/config.json",
        "foreign/config.json has an unknown field x ... remove or rename it",
    ),
    Wrong("run cut/config.json", "cut/config.json cannot be read as JSON"),
    Wrong("run field/config.json", "run.sync.quorun ... did you mean 'quorum'"),
    Wrong("run typed/config.json", "Expected `int`, got `str` ... `$.run.seed`"),
]

VALUES = [
    Wrong(
        "run two.py --sync.quorun 2",
        "Unrecognized options: --sync.quorun ... Perhaps you meant ... --sync.quorum",
    ),
    Wrong("run two.py --total-tokens many", "--total-tokens: many is not a whole"),
    Wrong("run two.py --total-tokens", "'--total-tokens' ... Expected 1 values"),
    Wrong("run two.py --total-tokens 0", "total_tokens = 0; it must be at least 1"),
    Wrong(
        "run two.py --sync.quorum 3",
        "sync.quorum = 3 ... 2 islands (v6e, v5p_a) ... "
        "lower sync.quorum or add islands",
    ),
    Wrong(
        "run two.py --sync.grace-window aliek",
        "'aliek' for argument '--sync.grace-window' ... ('alike', 'overlap')",
    ),
    Wrong(
        "run two.py --sync.codec-up int3",
        "sync.codec_up = 'int3' ... did you mean 'int8' ... "
        "choose from f32, bf16, int8, int4, int2",
    ),
    Wrong(
        "run two.py --sync.codec-up int2",
        "sync.codec_up = 'int2' with inner.optimizer = 'adamw' ... "
        "of the loss, and a codec may cost 0.5 % ... set sync.codec_up = 'int4'",
    ),
    Wrong(
        "run two.py --sync.merge men",
        "sync.merge = 'men' ... did you mean 'mean' ... "
        "choose from rda, mean, clipped_mean, trimmed_mean",
    ),
    Wrong(
        "run two.py --sync.merge nofile.py:f",
        "sync.merge = 'nofile.py:f': there is no file ... correct the path",
    ),
    Wrong(
        "run two.py --outer.optimizer nestrov",
        "outer.optimizer = 'nestrov' ... choose sgd, nesterov",
    ),
    Wrong(
        "run two.py --model.num-kv-heads 4",
        "model.num_heads = 6 ... model.num_kv_heads = 4 ... choose a multiple",
    ),
    Wrong(
        "run two.py --data.digest x",
        "data.digest = x ... has 23cf4afae86726df ... "
        "give the run's text (--data.paths)",
    ),
    Wrong(
        "run two.py --data.paths nosuch", "data.paths ... nosuch does not ... name a"
    ),
    Wrong("run two.py --data.paths empty", "data.paths ... empty is empty ... name a"),
    Wrong("run two.py --data.paths bytes", "is not text: a NUL byte ... leave it out"),
    Wrong(
        "run two.py --sequence-length 500",
        "491 tokens ... sequence_length = 500 ... (data.paths) or lower",
    ),
]

ISLANDS = [
    Wrong(
        "run two.py --islands.v6.batch-size 2",
        "options: --islands.v6.batch-size ... Perhaps you meant ... "
        "--islands.v6e.batch-size",
    ),
    Wrong(
        "run two.py --islands.v6e.mesh-fsdp 3",
        "islands.v6e.batch_size = 8 ... 1 * 3 * 1 * 1 = 3 ... choose a multiple of 3",
    ),
    Wrong(
        "run two.py --islands.v6e.mesh-expert 2",
        "islands.v6e.mesh_expert = 2 does not divide ... model.experts = 0 ... "
        "choose a divisor, or spread by mesh_data or mesh_fsdp",
    ),
    Wrong(
        "run two.py --model.experts 4 --model.experts-per-token 5",
        "model.experts_per_token = 5 ... model.experts = 4 ... at most as many",
    ),
    Wrong(
        "run two.py --islands.v6e.hosts 3",
        "islands.v6e.hosts = 3 does not divide 1 ... "
        "choose a divisor of 1, or a larger mesh",
    ),
    Wrong(
        "run two.py --islands.v6e.attention splash --sequence-length 100",
        "islands.v6e.attention = 'splash' ... sequence_length = 100 ... "
        "multiple of 128 ... 'dot_product'",
    ),
    Wrong(
        "island two.py --workdir w --name v6e", "--coordinator is missing ... --help"
    ),
    Wrong(
        "island two.py --workdir w --coordinator h:1", "--name is missing ... --help"
    ),
    Wrong(
        "island two.py --workdir w --name v6 --coordinator h:1",
        "no island 'v6' ... did you mean 'v6e' ... it has v6e, v5p_a",
    ),
    Wrong(
        "island two.py --workdir w --name v6e --coordinator foo",
        f"--coordinator: address 'foo' ... {ADDRESS}",
    ),
    Wrong(
        "island two.py --workdir w --name v6e --coordinator 10.0.0.1:7", NOT_LOOPBACK
    ),
    Wrong(
        "island two.py --workdir w --name v6e --coordinator h:1 --incarnation -1",
        "--incarnation -1 ... counted from 1 ... leave it out",
    ),
    Wrong(
        "island two.py --workdir w --name v6e --coordinator h:1 --world h:1",
        "--world h:1 ... 'v6e' has hosts = 1 ... leave it out, or set islands.v6e.host",
    ),
    Wrong(
        "island two.py --workdir w --name v6e --coordinator h:1 --host-index 1",
        "--host-index 1 ... 'v6e' has hosts = 1 ... one from 0 to 0",
    ),
    Wrong(
        "island two.py --workdir w --name v6e --coordinator h:1 --islands.v6e.hosts 2"
        " --islands.v6e.mesh-data 2 --world nonsense",
        f"--world: address 'nonsense' ... {ADDRESS}",
    ),
]

PLACEMENT = [
    Wrong(
        "run two.py --workdir gs://b/run",
        "placement.workdir = 'gs://b/run' ... no folder of this machine ... "
        "--checkpoints gs://b/run",
    ),
    Wrong(
        "run two.py --checkpoints ftp://x",
        "placement.checkpoints = 'ftp://x' ... begins with gs:// or s3:// ... "
        "give one of them",
    ),
    Wrong(
        "run two.py --workdir note.txt",
        "cannot make workdir ... note.txt: File exists ... another --workdir",
    ),
    Wrong(
        "run two.py --workdir note.txt/run",
        "cannot make workdir ... note.txt/run: Not a dir ... another --workdir",
    ),
    Wrong(
        "run two.py --workdir foreign", "foreign holds another ... another --workdir"
    ),
    Wrong(
        "run two.py --bind nonsense",
        f"placement.bind: address 'nonsense' ... {ADDRESS}",
    ),
    Wrong(
        "run two.py --advertise h:0",
        "placement.advertise = 'h:0' ... no island can dial ... give the port",
    ),
    Wrong(
        "run two.py --advertise x", f"placement.advertise: address 'x' ... {ADDRESS}"
    ),
    Wrong(
        "run two.py --certificates none", "none/ca.pem (No such file ... `diloco certs`"
    ),
    Wrong(
        "run two.py --metrics-bind nonsense",
        f"placement.metrics_bind: address 'nonsense' ... {ADDRESS}",
    ),
    Wrong(
        "run two.py --sinks tensrboard",
        "placement.sinks has 'tensrboard' ... did you mean 'tensorboard' ... "
        "there are tensorboard, wandb",
    ),
    Wrong(
        "run two.py --workers 30",
        "placement.workers = 30 ... 24 fragments ... "
        "at most as many, or more sync.fragments",
    ),
    Wrong(
        "run two.py --workers 2 --worker-addresses a:1",
        "placement.worker_addresses has 1 ... placement.workers = 2 ... "
        "one address for each",
    ),
    Wrong(
        "run two.py --workers 2 --worker-addresses a:1 b:1",
        "placement.workers = 2 ... starts all of a run on this machine ... "
        "start `diloco worker`",
    ),
    Wrong(
        "coordinator two.py --workdir w --init --workers 2",
        "placement.workers = 2 ... placement.worker_addresses is empty ... "
        "name there where each `diloco worker` runs",
    ),
    Wrong(
        "worker two.py --workdir w",
        "placement.worker_addresses is empty ... name there where each worker runs",
    ),
    Wrong("coordinator two.py", "--workdir is missing ... give the folder"),
    Wrong(
        "coordinator two.py --workdir w --init --bind 0.0.0.0:7000",
        "address 0.0.0.0:7000 is not loopback ... `diloco certs` ... --insecure",
    ),
]

FAULTS = [
    Wrong(
        "run two.py --faults v6e@3:kil",
        "placement.faults has 'v6e@3:kil' ... the forms are 'NAME@STEP:kill'",
    ),
    Wrong(
        "run two.py --faults v7@3:kill",
        "placement.faults has 'v7@3:kill' ... known are v6e, v5p_a, coordinator",
    ),
    Wrong(
        "run two.py --faults v6e@0:kill",
        "placement.faults has v6e@0 ... counted from 1 ... give a number above 0",
    ),
    Wrong(
        "run two.py --faults v6e/2@3:kill",
        "placement.faults has v6e/2@3 ... v6e has 1 host ... choose a host below 1",
    ),
    Wrong(
        "chaos two.py --strikes v7@3s:kill",
        "strikes has 'v7@3s:kill' ... known are v6e, v5p_a, coordinator",
    ),
    Wrong(
        "chaos two.py --strikes v6e@3s:kil",
        "strikes has 'v6e@3s:kil' ... 'WHO@TIMEs:kill' ... kinds are kill, stop",
    ),
    Wrong(
        "chaos two.py --kinds kil",
        "kinds has 'kil' ... did you mean 'kill' ... there are kill, stop",
    ),
    Wrong(
        "chaos two.py --schedule nosuch",
        "schedule = 'nosuch' cannot be read ... one strike a line",
    ),
    Wrong("chaos two.py --schedule bare.py", "schedule = 'bare.py' has no strike"),
    Wrong(
        "chaos two.py --strikes v6e@3s:kill --save-schedule no/file",
        "save_schedule = 'no/file' cannot be written ... in a folder that exists",
    ),
    Wrong("chaos two.py --kinds", "every_s above 1, found 20, and at least one of kin"),
    Wrong("chaos two.py --every-s 0", "every_s = 0.0; it must be above 0"),
    Wrong("chaos two.py --for-s inf", "for_s = inf"),
    Wrong("certs keys --workers -3", "workers = -3; ... at least 0"),
    Wrong("chaos nosuch", "no config file 'nosuch' ... quickstart"),
    Wrong("chaos empty", "empty/config.json ... give the workdir of a run"),
    Wrong("chaos 10.0.0.1:7", "no config file '10.0.0.1:7' ... give the path"),
]

WEIGHTS = [
    Wrong(
        "run two.py --init nosuch",
        "--init nosuch ... hf:DIR ... safetensors ... run:WORKDIR",
    ),
    Wrong(
        "run two.py --init hf:nosuch",
        "there is no ... nosuch/config.json ... give the folder of a model",
    ),
    Wrong(
        "run two.py --init hf:HuggingFaceTB/SmolLM2-135M",
        "does not give it ... "
        "hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M ... "
        "--init hf:SmolLM2-135M",
    ),
    Wrong("export nosuch out", "'nosuch' is neither a folder nor ... give a run's"),
    Wrong("export empty out", "no empty/config.json ... give the workdir of a run"),
    Wrong("export empty out --dtype int7", "'int7' ... '--dtype' ... 'float32'"),
    Wrong(
        "generate empty --prompt x",
        "no empty/config.json ... give the folder of a model",
    ),  # It does not say that a run's workdir would do.
    Wrong("generate empty --prompt x --temperature=-1", "temperature = -1.0 ... least"),
]

RUNS = [
    Wrong("run --resume", "--resume takes the workdir"),
    Wrong("run --resume nosuch", "--resume nosuch ... no such folder ... the workdir"),
    Wrong(
        "run --resume empty", "--resume empty: no run is there ... diloco run CONFIG"
    ),
    Wrong("run --resume foreign", "--resume foreign: no run is there ... diloco run"),
    Wrong("run two.py --resume empty", "empty holds no run"),
    Wrong("run two.py --resume nosuch", "nosuch ... there is no such folder"),
    Wrong(
        "run two.py --resume empty --workdir other",
        "--workdir other with --resume empty ... leave --workdir out",
    ),
    Wrong("status nowhere", NO_FOLDER),
    Wrong("dashboard nowhere", "no nowhere/config.json; give the workdir of a run"),
    Wrong("status h:x", f"address 'h:x' ... {ADDRESS}"),
    Wrong("status 10.0.0.1:7", NOT_LOOPBACK),
    Wrong("status 127.0.0.1:1", "127.0.0.1:1: nothing listens ... check", code=1),
    Wrong("status empty", "empty has neither coordinator.address ... no run was star"),
    Wrong("admit x", "--coordinator is missing ... HOST:PORT ... workdir"),
    Wrong("admit ../x --coordinator h:1", "island name '../x' ... rename it"),
    Wrong("eval empty", "no empty/config.json ... give the workdir of a run"),
    Wrong(
        "eval foreign", "foreign/config.json has an unknown field x"
    ),  # It does not say that no run is there.
]

STUDIES = [
    Wrong("fork", "WORKDIR comes first ... give the workdir of a run"),
    Wrong("fork empty --at 3", "no empty/config.json ... give the workdir of a run"),
    Wrong("fork recorded", "at = 0 ... give --at, the last merge that the fork sha"),
    Wrong("fork recorded --at 3", "recorded has no tape.jsonl ... give the workdir"),
    Wrong(
        "fork recorded --at 3 --model.d-model 64",
        "model.d_model: 64 in the fork, 32 in the run ... "
        "leave --model.d_model out ... recorded DIR --cycle ... --init hf:DIR",
    ),
    Wrong("fork recorded --at 3 --skip-merges 2 5", "at = 3, skip_merges = 2 5"),
    Wrong("fork recorded --at 3 --without b", "no island 'b' ... it has a"),
    Wrong("emulate two.py --step-spread 2", "step_spread = 2.0 ... at most 1"),
    Wrong("emulate two.py --line.latency-s=-1", "latency_s = -1.0 ... at least 0"),
    Wrong("emulate two.py --evaluate-every-tokens=-1", "tokens = -1 ... at least 0"),
    Wrong("emulate two.py --joins v7 0 1", "joins has 'v7' ... there are v6e, v5p_a"),
    Wrong("emulate two.py --joins v6e 2 1", "joins.v6e = 2 to 1 ... 0 <= from < to"),
    Wrong("simulate goodput --hours=-1", "hours = -1.0; it must be above 0"),
    Wrong("simulate goodput --method elstic", "'elstic' ... '--method' ... 'elastic'"),
    Wrong(
        "simulate goodput --quorum 9 --islands 2",
        "quorum = 9 ... islands = 2 ... lower quorum or add islands",
    ),
    Wrong("simulate bandwidth --params 0", "params = 0.0; it must be above 0"),
    Wrong("simulate faults --seeds 0", "seeds = 0; it must be at least 1"),
    Wrong("simulate faults --schedule x", "--schedule ... not a schedule ... JSON"),
]

PLANS = [
    Wrong(
        "plan two.py",
        "islands.v6e.topology is empty ... name the slice ... 'v5p:2x2x1'",
    ),
    Wrong(
        "plan cloud.py --arithmetic --islands.v5p.topology v5p:2x2x3",
        "islands.v5p.topology = 'v5p:2x2x3' does not exist ... "
        "nearest v5p topologies are v5p:2x2x4",
    ),
    Wrong(
        "plan cloud.py --arithmetic --islands.v5p.topology v9:2x2",
        "islands.v5p.topology = 'v9:2x2' is no TPU topology ... "
        "generation of v4, v5e, v5p, v6e, tpu7x",
    ),
    Wrong(
        "plan cloud.py --arithmetic --price v9=4",
        "price = 'v9=4' ... a name of v4, v5e, v5p, v6e, tpu7x, coordinator, traffic",
    ),
    Wrong(
        "plan cloud.py --arithmetic --price v5p=dear",
        "price = 'v5p=dear' ... a number of at least 0",
    ),
    Wrong("rehearse two.py --max-price 5", "--max-price 5 ... needs --price"),
    Wrong("rehearse two.py --share 2", "share = 2 ... at most 1"),
    Wrong(
        "rehearse two.py --records nosuch", "nosuch has no tape ... name the workdir"
    ),
    Wrong(
        "rehearse two.py --on gke --records w",
        "--records w starts nothing ... --on gke makes machines ... "
        "leave one of them out",
    ),
    Wrong("launch two.py", "--on is missing ... --on tpu_vm, --on gke or --on sky"),
    Wrong("launch two.py --on aws", "'aws' for argument '--on' ... 'sky'"),
    Wrong(
        "launch two.py --on gke --dry-run",
        "launch.project, launch.image, launch.coordinator_zone, launch.cluster ... "
        "launch.zones.v6e, launch.zones.v5p_a must be set ... --launch.project",
    ),
    Wrong(
        "launch cloud.py --on gke --dry-run --only v5",
        "--only v5: no such part ... did you mean 'v5p' ... "
        "it has coordinator, v5p, v6e",
    ),
    Wrong(
        "plan two.py --launch.zones v6 us-east5-a",
        "launch.zones.v6 = 'us-east5-a' ... no such island (did you mean 'v6e'?) ... "
        "it has v6e, v5p_a",
    ),
    Wrong(
        "plan cloud.py --arithmetic --launch.zones.v5p us-east5",
        "launch.zones.v5p = 'us-east5' ... no zone ... such as 'us-central1-a'",
    ),
    Wrong(
        "launch cloud.py --on gke --dry-run --launch.zones v5p=mars-1a",
        "options: --launch.zones ... Perhaps you meant ... --launch.zones.v5p",
    ),
    Wrong(
        "launch cloud.py --on gke",
        "no terminal to ask on ... "
        "give --yes to run the commands; `diloco launch` shows them with --dry-run",
    ),
    Wrong(
        "launch cloud.py --on gke --dry-run --disk",
        "--disk with --action create ... leave it out",
    ),
]

TEXT = [
    Wrong("data prepare", "Missing from diloco data prepare ... OUT"),
    Wrong("data prepare text text", "OUT ... text exists ... the name of a new folder"),
    Wrong("data prepare out nosuch", "SOURCES: nosuch does not exist ... name a text"),
    Wrong(
        "data prepare out json",
        "json/a.jsonl, offset 0 ... its fields are txt; it needs 'text' ... "
        "give --text-field",
    ),
    Wrong("data prepare out half", "half/a.jsonl, offset 14 ... Expecting"),
    Wrong("data prepare out bytes", "bytes/a.txt is not text ... NUL byte at offset 1"),
    Wrong("data prepare gs://b/x text", "OUT: gs://b/x is a bucket ... give a folder"),
    Wrong("data prepare out s3://b/in", "SOURCES: s3://b/in is a bucket ... mount it"),
    Wrong(
        "data prepare out text --text-field ''", "--text-field is empty ... give the"
    ),
    Wrong("data prepare out text --turn a", "--turn ... 'a' has 0 places ... chatml"),
    Wrong(
        "data prepare out text --tokenizer nosuch",
        "--tokenizer: nosuch is no file ... give a tokenizer.json",
    ),
    Wrong("manifest nosuch", "data.paths: nosuch does not exist ... name a text file"),
    Wrong("manifest empty", "data.paths: empty is empty ... name a file or folder"),
]

NEW_FILES = [
    Wrong("init two.py", "two.py exists ... give another name, or delete it"),
    Wrong("init mine.yaml", "'mine.yaml' is no .py file ... give one, as in my_run.py"),
    Wrong(
        "init no/mine.py", "no/mine.py ... no folder no ... make it, or give another"
    ),
    Wrong("init mine.py --like quickstrat", "'quickstrat' ... mean 'quickstart'"),
    Wrong("certs note.txt --hosts a", "to note.txt: File exists ... that is writable"),
    Wrong(
        "certs keys --hosts a/b", "name 'a/b' is neither ... give it as islands dial"
    ),
    Wrong("certs keys --hosts a --days 0", "--days 0 ... 1 day to ... 3650 days"),
    Wrong("certs keys --revoke x", "--revoke x ... no certificate of that name"),
    Wrong("certs keys --revoke x --add", "--add ... --revoke: choose one of them"),
    Wrong("certs keys --add --hosts a", "keys/ca.pem ... without --add it makes a new"),
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
