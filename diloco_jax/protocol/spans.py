"""Sets of numbers as sorted, disjoint, half-open ranges."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_jax.protocol.values import Span


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers that are in any of `spans`, which may overlap."""
    found: list[Span] = []
    for span in sorted(spans):
        if span.start >= span.stop:
            continue
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return tuple(found)


def without(spans: Iterable[Span], taken: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers that are in any of `spans` and in none of `taken`."""
    left = joined(spans)
    for span in joined(taken):
        left = tuple(part for kept in left for part in _cut(kept, span))
    return left


def common(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers that are in any of `spans` and in any of `others`."""
    inside = list(others)
    return joined(
        Span(max(a.start, b.start), min(a.stop, b.stop)) for a in spans for b in inside
    )


def _cut(span: Span, taken: Span) -> Iterable[Span]:
    if taken.stop <= span.start or span.stop <= taken.start:
        yield span
        return
    if span.start < taken.start:
        yield Span(span.start, taken.start)
    if taken.stop < span.stop:
        yield Span(taken.stop, span.stop)
