"""Tables of the fields of msgspec structs, for pages about formats."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable

import msgspec
from msgspec import inspect as shapes

from diloco_jax.config.options import paragraph
from diloco_jax.protocol import messages

Struct = type[msgspec.Struct]

EVERYWHERE = {
    "after": "boundaries to wait for",
    "asked": "who, or what, is asked",
    "base": "version whose anchor the delta is against",
    "bytes_join": "bytes fetched to join",
    "carried": "what it brings along from an earlier term; none: nothing",
    "code": "the reason, for programs",
    "compile_seconds": "time in compilation",
    "complete": "true if the whole delta is there",
    "contributions": "the deltas in the merge",
    "cosine_to_last": "[metrics](../docs/metrics.md#metricsjsonl)",
    "count": "number of publishes",
    "counted_tokens": "tokens of the steps that earlier terms' progress includes",
    "cycle": "number of the cycle",
    "data_seconds": "time in which it waited for batches",
    "digest": "digest of the bytes",
    "end": "step after the last one",
    "environment": "software versions, devices, host, threads and processes",
    "eval_loss": "validation loss, nats per token",
    "eval_seconds": "time in validation",
    "expert_loads": "[metrics](../docs/metrics.md#metricsjsonl)",
    "experts": "[metrics](../docs/metrics.md#metricsjsonl)",
    "final": "true if it belongs to the flush",
    "fingerprint": "hash of all that islands must agree on",
    "first_step_unix": "when it made its first step",
    "fit": "deltas in a row that were within bounds",
    "fragment": "number of the fragment; -1: none",
    "fragment_parameters": "parameters by fragment",
    "fragments": "numbers of the fragments",
    "how": "what to do",
    "in_merges": "steps that merges have, by fragment",
    "incarnation": "which life of the island's process",
    "island": "name of the island",
    "island_config": "the island's `IslandConfig`",
    "kind": "which kind it is",
    "last_step_unix": "when it made its newest step",
    "learning_rate": "of its last step",
    "left_behind": "deltas that may still be merged",
    "length": "bytes of the stripe",
    "length_ratio": "[metrics](../docs/metrics.md#metricsjsonl)",
    "loss": "nats per token",
    "lost_tokens_by_fragment": "tokens that are lost, by fragment",
    "max_step_gap_seconds": "longest time between two steps",
    "measures": "measurements since the incarnation began",
    "median_step_seconds": "median time of a step",
    "message": "the reason, for people",
    "most": "the length allowed, if known",
    "name": "name of the file; empty: keep the cycle",
    "next_position": "no position from here on is granted to any island",
    "norm": "length of the delta, if known",
    "number": "number of the merge in its term",
    "offset": "where it begins",
    "outstanding": "takes without a verdict",
    "own_tokens": "tokens of this incarnation's steps",
    "pairwise_cosine": "[metrics](../docs/metrics.md#metricsjsonl)",
    "parameters_digest": "digest of the global parameters",
    "peer": "address of the peer",
    "phase": "what the island does",
    "piece": "number of the piece in the fragment",
    "plan": "digest of the fragment plan",
    "reason": "[why](../docs/metrics.md#why-tokens-are-lost)",
    "record": "what happened on the island",
    "records": "what happened on the island since the last report",
    "records_through": "number of the newest record that need not be resent",
    "refused": "unfit deltas in a row",
    "resumed": "true if this incarnation was known already",
    "run_id": "the run",
    "said": "the reason, for people",
    "seq": "number of the record",
    "sequences_granted": "sequences of data that were leased to the incarnation",
    "sequences_per_step": "sequences in a step of the island",
    "session": "the connection, drawn once per process",
    "settled_steps_by_fragment": "steps whose fate is decided, by fragment",
    "span": "the positions",
    "stalled_seconds": "time without a step on the device",
    "start": "first step, or first position",
    "step": "step of the incarnation",
    "step_ratio": "[metrics](../docs/metrics.md#metricsjsonl)",
    "step_seconds": "median time of a step",
    "step_seconds_total": "time in steps",
    "steps": "steps of the incarnation",
    "stop": "position after the last one",
    "term": "term of the run",
    "text": "for people",
    "through": "the newest number of those",
    "tick": "number of the tick; -1: none",
    "tokens": "number of tokens",
    "tokens_per_step": "tokens in a step of the island",
    "total": "bytes of the whole",
    "total_tokens": "tokens at which the run ends",
    "value": "a number, by kind",
    "verdict": "what became of the take",
    "version": "version of the fragment",
    "want": "the version that is wanted",
    "why": "the reason",
    "worker": "number of the worker",
}
"""Meanings of fields that are the same wherever a field has no text of its own."""


def section(kind: type, named: list[type]) -> list[str]:
    """Return heading, meaning and fields of a struct or a named tuple; add the values
    that its fields name to `named`."""
    is_struct = issubclass(kind, msgspec.Struct)
    tag = kind.__struct_config__.tag if is_struct else None
    head = tag if is_struct and isinstance(tag, str) else kind.__name__
    lines = [f"### {head}", "", paragraph(inspect.getdoc(kind)), ""]
    fields = _fields(kind, named)
    return [*lines, rows("field", "type", "default", "what it is", of=fields), ""]


def _fields(kind: type, named: list[type]) -> list[tuple[str, ...]]:
    found = shapes.type_info(kind)
    assert isinstance(found, (shapes.StructType, shapes.NamedTupleType))
    texts = _texts(kind)
    made = []
    for field in found.fields:
        default = "" if field.required else f"`{_default(field)}`"
        shown = _type(field.type, named)
        made.append(
            (
                f"`{field.encode_name}`",
                shown,
                default,
                texts.get(field.name) or EVERYWHERE.get(field.name, ""),
            )
        )
    return made


def _default(field: shapes.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return repr(field.default_factory())
    shown = field.default
    if isinstance(shown, msgspec.Struct):
        return f"{type(shown).__name__}()"
    return repr(list(shown) if isinstance(shown, tuple) else shown)


def _type(found: shapes.Type, named: list[type]) -> str:
    """Return a type as a reader of MessagePack or JSON needs it."""
    match found:
        case shapes.UnionType():
            plain = set(map(type, found.types)) >= PLAIN
            names = ["plain value"] if plain else []
            for member in found.types:
                if not (plain and type(member) in PLAIN):
                    names.append(_type(member, named))
            return " or ".join(names)
        case shapes.LiteralType():
            return "one of " + ", ".join(f"`{value}`" for value in found.values)
        case shapes.StructType() | shapes.NamedTupleType():
            if found.cls not in named:
                named.append(found.cls)
            return f"[{found.cls.__name__}](#{found.cls.__name__.lower()})"
        case shapes.VarTupleType() | shapes.ListType():
            item = _type(found.item_type, named)
            item = f"({item})" if " or " in item else item
            most = f", at most {found.max_length}" if found.max_length else ""
            return f"list of {item}{most}"
        case shapes.TupleType():
            return f"[{', '.join(_type(t, named) for t in found.item_types)}]"
        case shapes.DictType():
            return f"map to {_type(found.value_type, named)}"
        case shapes.IntType() | shapes.FloatType():
            name = "int" if isinstance(found, shapes.IntType) else "float"
            return f"{name}{_range(found.ge, found.le)}"
        case shapes.StrType() | shapes.BytesType():
            name = "str" if isinstance(found, shapes.StrType) else "bytes"
            if getattr(found, "pattern", None) == messages.ISLAND_NAME:
                return "name of an island"
            return f"{name}, at most {found.max_length}" if found.max_length else name
        case shapes.Metadata():
            return _type(found.type, named)
    return type(found).__name__.removesuffix("Type").lower()


PLAIN = {
    shapes.StrType,
    shapes.IntType,
    shapes.FloatType,
    shapes.BoolType,
    shapes.NoneType,
}
"""Types of the values that JSON has without structure."""


def _range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f", {_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    """Return a power of two as such, and any other number as it is written."""
    whole = int(value)
    sign = "-" if value < 0 else ""
    if whole == value and abs(whole) >= 1 << 16 and abs(whole).bit_count() == 1:
        return f"{sign}2^{abs(whole).bit_length() - 1}"
    return f"{value:g}"


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    """Return the strings that stand under the fields of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("diloco_jax"):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(said))),
                ):
                    found[name] = paragraph(inspect.cleandoc(said))
    return found


def rows(*heads: str, of: Iterable[tuple[str, ...]]) -> str:
    """Return a table; empty if there are no rows."""
    made = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in of]
    if not made:
        return "It has no fields."
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *made])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
