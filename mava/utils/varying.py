"""Which results of a traced function can differ between devices or replicas."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from mava.utils.parallel import AXES

Axes = frozenset[str]
NONE: Axes = frozenset()
ALL: Axes = frozenset(AXES)
REDUCTIONS = ("psum", "pmax", "pmin")


def varying_axes(jaxpr: Jaxpr, inputs: Sequence[Axes]) -> list[Axes]:
    """Returns, for each output of `jaxpr`, the named axes along which it may vary.

    A reduction over an axis takes it away, an index along an axis brings it in, everything else
    hands on what its operands have. Never too few axes; maybe too many: a primitive that is not
    looked into (`while`, custom derivatives), but has to do with named axes, brings in all of them.

    Args:
        inputs: the axes along which each input varies.
    """
    known: dict[Any, Axes] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(var: Any) -> Axes:
        return NONE if isinstance(var, Literal) else known.get(var, NONE)

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        known |= zip(eqn.outvars, _of_equation(eqn, operands), strict=True)
    return [read(var) for var in jaxpr.outvars]


def _of_equation(eqn: Any, operands: list[Axes]) -> list[Axes]:
    name, params = eqn.primitive.name, eqn.params
    if name in REDUCTIONS and params.get("axis_index_groups") is None:
        return [axes.difference(params["axes"]) for axes in operands]
    if name == "axis_index":
        return [frozenset([params["axis_name"]])]
    if name in ("jit", "pjit"):
        return varying_axes(params["jaxpr"].jaxpr, operands)
    if name == "cond":
        predicate, *rest = operands
        branches = [varying_axes(branch.jaxpr, rest) for branch in params["branches"]]
        return [predicate.union(*outs) for outs in zip(*branches, strict=True)]
    if name == "scan":
        return _of_scan(eqn, operands)
    together = ALL if _names_an_axis(eqn) else NONE.union(*operands)
    return [together] * len(eqn.outvars)


def _names_an_axis(eqn: Any) -> bool:
    """Returns whether a collective or an index along an axis stands in an equation."""
    for param in eqn.params.values():
        for value in param if isinstance(param, tuple | list) else (param,):
            if isinstance(value, str) and value in AXES:
                return True
            jaxpr = getattr(value, "jaxpr", value)
            if isinstance(jaxpr, Jaxpr) and any(_names_an_axis(inner) for inner in jaxpr.eqns):
                return True
    return False


def _of_scan(eqn: Any, operands: list[Axes]) -> list[Axes]:
    """The carry takes what the body gives it, until that no longer grows."""
    body = eqn.params["jaxpr"].jaxpr
    # What is scanned over, and stacked, has one axis more outside of the body.
    num_xs = _count_stacked(eqn.invars, body.invars)
    num_carry = len(eqn.outvars) - _count_stacked(eqn.outvars, body.outvars)
    start = len(operands) - num_xs - num_carry
    while True:
        outs = varying_axes(body, operands)
        carry = operands[start : start + num_carry]
        grown = [old | new for old, new in zip(carry, outs[:num_carry], strict=True)]
        if grown == carry:
            return outs
        operands = [*operands[:start], *grown, *operands[start + num_carry :]]


def _count_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(a.aval.ndim == b.aval.ndim + 1 for a, b in zip(outside, inside, strict=True))
