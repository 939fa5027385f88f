"""Which parameters the updates of an optax transformation depend on, found in what JAX traces.

Other than trying values, this sees what happens in later steps only, such as clipping by a global
norm that begins in step 1,000, or when something exceeds a limit. What it cannot look into counts
as depending on all that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.tree_util import keystr, tree_flatten_with_path

Sources = frozenset[int]
"""Parameters, by their places in the tree: of each its value and its gradients."""

_NONE: Sources = frozenset()
# Operations whose only program has the operation's inputs and results.
_CALLS = "jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"


def sources_of_updates(tx: Any, params: Any) -> tuple[list[Sources], dict[str, Sources]]:
    """Return what the update of each parameter, and each array of the state by path, depend on.

    Args:
        tx: A transformation with `init` and `update`.
        params: The parameters; only their shapes and dtypes matter.
    """
    own = [frozenset([i]) for i in range(len(jax.tree.leaves(params)))]
    begin, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    of_state = _reach(begin, own)
    while True:
        step, (_, next_state) = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
        found = _reach(step, [*own, *of_state, *own])
        updates, after = found[: len(own)], found[len(own) :]
        structures: list[Any] = [jax.tree.structure(tree) for tree in (state, next_state)]
        if structures[0] == structures[1]:
            after = _union(of_state, after)
            if after == of_state:
                paths = [keystr(path) for path, _ in tree_flatten_with_path(state)[0]]
                return updates, dict(zip(paths, of_state, strict=True))
        state, of_state = next_state, after


def _reach(program: Any, given: Sequence[Sources]) -> list[Sources]:
    """Return the sources of a jaxpr's results, given those of its inputs."""
    program = getattr(program, "jaxpr", program)  # without its constants, if it has them
    known = dict(zip(program.invars, given, strict=True))

    def sources(variables: Any) -> list[Sources]:
        return [_NONE if isinstance(v, Literal) else known.get(v, _NONE) for v in variables]

    for equation in program.eqns:
        found = _through(equation, sources(equation.invars))
        known.update(zip(equation.outvars, found, strict=True))
    return sources(program.outvars)


def _through(equation: Any, given: list[Sources]) -> list[Sources]:
    name, how = equation.primitive.name, equation.params
    if name in _CALLS:
        return _reach(how["jaxpr"] if "jaxpr" in how else how["call_jaxpr"], given)
    if name == "cond":
        by_branch = [_reach(branch, given[1:]) for branch in how["branches"]]
        return [given[0].union(*each) for each in zip(*by_branch, strict=True)]
    if name == "scan":
        n_carried = _n_alike(how["jaxpr"].out_avals, equation.outvars)
        n_fixed = _n_alike(how["jaxpr"].in_avals, equation.invars) - n_carried
        fixed, carried = given[:n_fixed], given[n_fixed : n_fixed + n_carried]
        rows = given[n_fixed + n_carried :]
        while True:
            found = _reach(how["jaxpr"], [*fixed, *carried, *rows])
            merged = _union(carried, found[:n_carried])
            if merged == carried:
                return found
            carried = merged
    if name == "while":
        n_tested = how["cond_nconsts"]
        n_fixed = n_tested + how["body_nconsts"]
        carried = given[n_fixed:]
        while True:
            (goes_on,) = _reach(how["cond_jaxpr"], [*given[:n_tested], *carried])
            found = _reach(how["body_jaxpr"], [*given[n_tested:n_fixed], *carried])
            merged = [goes_on | each for each in _union(carried, found)]
            if merged == carried:
                return carried
            carried = merged
    return [_NONE.union(*given)] * len(equation.outvars)


def _n_alike(inside: Any, outside: Any) -> int:
    """Return how many of a loop's variables are no rows, which have a dimension less inside.

    How many of each kind there are is written down differently in each version of JAX.
    """
    return sum(a.ndim == v.aval.ndim for a, v in zip(inside, outside, strict=True))


def _union(some: Sequence[Sources], others: Sequence[Sources]) -> list[Sources]:
    return [a | b for a, b in zip(some, others, strict=True)]
