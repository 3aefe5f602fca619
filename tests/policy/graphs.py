"""Random graphs for the tests of the policy."""

from __future__ import annotations

import random
from dataclasses import replace

from leangrad.policy.graph import Graph, Value

POINTWISE = {"is_inlined": True, "can_inline": True}


def random_graph(seed: int, *, forward: int, backward: int, special: float = 0.15, can_be_cut: bool = False) -> Graph:
    """A step of ``forward`` and ``backward`` values.

    special: how often a value is of each unusual kind. can_be_cut: nothing can neither be kept nor made again.
    """
    choose = random.Random(seed)

    def is_special() -> bool:
        return choose.random() < special

    values: list[Value] = []
    for n in range(forward + backward):
        is_backward = n >= forward
        near = range(max(0, n - 6), n)
        inputs = tuple(choose.choices(near, k=choose.randint(0 if n < 3 else 1, 3))) if n else ()
        if is_backward:  # what depends on the gradient: of the value before, or of any of forward
            inputs = (*inputs, choose.randrange(forward), *((n - 1,) if n > forward else ()))
        value = Value(choose.randint(0, 12), inputs, is_backward, price=choose.randint(0, 8), work=choose.randint(0, 9))
        value = replace(
            value, is_inlined=choose.random() < 0.5, can_inline=choose.random() < 0.6, is_output=is_special()
        )
        if inputs and is_special():
            value = replace(value, view_of=inputs[0], is_inlined=False, price=0)
        elif not is_backward:
            value = _of_a_kind(value, choose.random() / special)
            value = replace(value, is_fixed=value.is_fixed and (value.can_be_kept or not can_be_cut))
        values.append(value)
    return Graph(values)


def _of_a_kind(value: Value, kind: float) -> Value:
    if kind < 1:
        return replace(value, is_fixed=True)
    if kind < 2:
        return replace(value, is_standing=True, is_fixed=True, inputs=(), is_inlined=False, is_output=False)
    if kind < 3:
        return replace(value, can_be_kept=False, nbytes=0, is_fixed=bool(value.inputs) and kind < 2.5, is_output=False)
    if kind < 3.5 and value.inputs:
        return replace(value, is_forced=True)
    return replace(value, is_asked_for=kind < 4)


def transformer(blocks: int, width: int = 1 << 20) -> Graph:
    """Forward and backward of as many blocks: norms, products, attention, a written-out activation, two sums."""
    values: list[Value] = []

    def add(nbytes: int, *inputs: int, **kinds: object) -> int:
        values.append(Value(nbytes, inputs, **kinds))  # type: ignore[arg-type]
        return len(values) - 1

    def pointwise(nbytes: int, *inputs: int, **kinds: object) -> int:
        return add(nbytes, *inputs, price=nbytes // 10, work=nbytes // 10, **POINTWISE, **kinds)

    def product(nbytes: int, *inputs: int, **kinds: object) -> int:
        return add(nbytes, *inputs, work=4 * nbytes, **{"is_fixed": "is_backward" not in kinds, **kinds})

    x = add(width, is_fixed=True, is_standing=True)
    made = []
    for _ in range(blocks):
        weights = [add(width // 4, is_fixed=True, is_standing=True) for _ in range(4)]
        mean = add(width // 512, x, is_fixed=True, can_inline=True, work=width)
        norm = [pointwise(width, x, mean)]
        for _ in range(6):
            norm.append(pointwise(width, norm[-1], mean))
        heads = product(3 * width, norm[-1], weights[0])
        parts = [add(width, heads, view_of=heads) for _ in range(3)]
        context = product(width, *parts)
        middle = pointwise(width, x, product(width, context, weights[1]))
        up = product(4 * width, middle, weights[2])
        act = [pointwise(4 * width, up)]
        for _ in range(11):
            act.append(pointwise(4 * width, act[-1], up))
        out = pointwise(width, middle, product(width, act[-1], weights[3]))
        made.append((x, mean, norm, parts, context, middle, up, act, weights))
        x = out
    grad = add(width, x, is_backward=True)
    back: dict[str, object] = {"is_backward": True}
    for x, mean, norm, parts, context, middle, up, act, weights in reversed(made):
        product(width // 4, grad, act[-1], is_output=True, **back)
        inner = product(4 * width, grad, weights[3], **back)
        for one in reversed(act):
            inner = pointwise(4 * width, inner, one, up, **back)
        product(width // 4, inner, middle, is_output=True, **back)
        grad = pointwise(width, grad, product(width, inner, weights[2], **back), **back)
        product(width // 4, grad, context, is_output=True, **back)
        inner = product(3 * width, product(width, grad, weights[1], **back), *parts, context, **back)
        product(width // 4, inner, norm[-1], is_output=True, **back)
        inner = product(width, inner, weights[0], **back)
        for one in reversed(norm):
            inner = pointwise(width, inner, one, mean, **back)
        grad = pointwise(width, grad, inner, x, **back)
    return Graph(values)
