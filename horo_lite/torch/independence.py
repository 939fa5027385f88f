"""What an optimizer updates independently of what: known of torch's, claimed of others, and tried.

With shard_state, a rank's optimizer sees its share of the parameters only. One that combines them,
as by the norm of all gradients, would then compute something else on each rank, without an error.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch

from horo_lite.state.trees import Tree, in_brackets

ELEMENTS = "elements"
PARAMETERS = "parameters"
KEPT, CHANGED, DROPPED = "kept", "changed", "dropped"
"""What step() does to gradients."""
_INDEPENDENT = {
    **dict.fromkeys(
        ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
         "Rprop", "SGD"),
        ELEMENTS,
    ),
    **dict.fromkeys(("Adafactor", "Muon", "SparseAdam"), PARAMETERS),
}  # fmt: skip
"""What torch's optimizers update independently of each other."""
OF_EACH = ("params", "param_names")
"""What a group of parameters has for each of them; the rest are options."""
_N_STEPS = (8, 32)  # some look at others from the second step on only; more, if nothing changes
_N_COPIES = 3  # some combine a parameter with the next one, or with the next but one
_N_TRIED = 6  # parameters of a group
_SIZE = 4096  # elements of each; optimizers with 8-bit state keep float32 for smaller ones
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Dtypes to try with, and how much of the largest element is rounding; most results are equal."""


def what_is_independent(optimizer: Any, given: bool | str) -> str:
    """Return what the optimizer updates independently: elements, or parameters."""
    kind = type(optimizer)
    # Torch's constructor makes all three; one that wraps another optimizer may not have called it.
    made = {"param_groups", "state", "_optimizer_state_dict_pre_hooks"}
    if not made <= vars(optimizer).keys():
        raise ValueError(
            f"shard_state: the param_groups or the state of {kind.__name__} are those of another "
            "optimizer inside it: pass that one to DistributedOptimizer, and the result to "
            f"{kind.__name__}"
        )
    if isinstance(given, str):
        return given
    known = _INDEPENDENT.get(kind.__name__)
    if known is None or getattr(torch.optim, kind.__name__, None) is not kind:
        raise ValueError(
            f"shard_state=True: {kind.__name__} is not an optimizer of which horo_lite knows what "
            'it updates independently. Pass shard_state="elements" if the update of each element '
            "depends on the gradients and state of no other element, as in Adam, or "
            '"parameters" if it depends on those of no other parameter, as in Adafactor. An '
            "optimizer that combines all parameters, such as LBFGS, cannot be sharded"
        )
    return known


class _Outcome(NamedTuple):
    """What a copy of the optimizer made of the small parameters that it had."""

    changes_others: bool  # it has also changed what stands for parameters outside of param_groups
    values: dict[int, Any]  # flat
    state: dict[tuple[int, str], tuple[Any, bool]]  # flat, and whether it is in the same shape
    numbers: dict[tuple[int, str], Any]  # in the options of each group
    gradients: str  # what has become of them: KEPT, CHANGED or DROPPED
    objects: set[str]  # the types of those in the state of parameters

    def differs(self, other: _Outcome) -> bool:
        """Return whether other parameters have come out."""
        return any(not torch.equal(x, other.values[i]) for i, x in self.values.items())


def check_independent(optimizer: Any, step: Callable[[Any], Any], claimed: str) -> tuple[str, str]:
    """Raise ValueError if the optimizer does not update independently what is claimed.

    Tried on a copy of it, with small parameters, which are updated together, and then by copies of
    which each has a part.

    Args:
        optimizer: Before its first step.
        step: Its step(), without hooks.
        claimed: ELEMENTS or PARAMETERS.

    Returns:
        What step() does to gradients (KEPT, CHANGED or DROPPED), and why the optimizer could not be
        tried, or nothing.
    """
    name = type(optimizer).__name__
    like = [
        (g, *each)
        for g, group in enumerate(optimizer.param_groups)
        for each in islice((x for x in with_names(group) if _is_tried(x[0])), _N_TRIED)
    ]
    why = ""
    for dtype in _ROUNDING:
        updated = partial(_updated, optimizer, step, claimed, like, dtype)
        try:
            with torch.random.fork_rng(devices=[]):
                (before,) = updated(1, 0)
                for n_steps in _N_STEPS:
                    (whole,) = updated(1, n_steps)
                    if (has_changed := whole.differs(before)) or whole.changes_others:
                        break
                parts = [] if whole.changes_others else updated(_N_COPIES, n_steps)
            if like and not (has_changed or whole.changes_others):
                raise RuntimeError(f"nothing has changed after {n_steps} steps")
            break
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    else:
        return KEPT, (
            f"shard_state={claimed!r}: {name} could not be tried with small parameters ({why}). "
            f"If its update of some depends on other {claimed}, they will not be what they are "
            "without shard_state"
        )
    if whole.changes_others:
        raise ValueError(
            f"shard_state={claimed!r}: step() of {name} changes parameters that it does not take "
            "from its param_groups, such as those of another optimizer inside it, so each rank "
            "would update all of them: pass that one to DistributedOptimizer, and the result to "
            f"{name}, or omit shard_state"
        )
    if claimed == ELEMENTS and whole.objects:
        raise ValueError(
            f"shard_state={claimed!r}: {name} keeps a {min(whole.objects)} in the state of a "
            'parameter, and that of its pieces cannot be joined: try "parameters", or omit '
            "shard_state"
        )
    owners = [f"a parameter of shape {list(parameter.shape)}" for _, parameter, _ in like]
    compared = [
        (of, whole.values[i], torch.cat([part.values[i] for part in parts if i in part.values]))
        for i, of in enumerate(owners)
    ]
    owners.append("the optimizer")
    for key, (one, is_like) in whole.state.items():  # state_dict() returns it of the whole
        kept = [part.state[key] for part in parts if key in part.state]
        found = [x for x, _ in kept]
        if all([is_like, *(like for _, like in kept)]):
            found = [torch.cat(found)] if found else []
        compared += [(f"{key[1]!r}, the state of {owners[key[0]]},", one, other) for other in found]
    compared += [
        (f"its {key[1]!r}", whole.numbers.get(key, number), number)
        for part in parts
        for key, number in part.numbers.items()
    ]
    for what, one, other in compared:
        rounding = _ROUNDING[dtype] * max(one.abs().nan_to_num(0, 0, 0).tolist(), default=0)
        if one.shape != other.shape or not torch.allclose(one, other, 0, rounding, equal_nan=True):
            raise ValueError(
                f"shard_state={claimed!r} is not true of {name}: what step() makes of {what} "
                f"depends on other {claimed}, or on random numbers. ({_N_COPIES} copies of the "
                "optimizer, of which each had a part of some small parameters, came to another "
                "result than one with all.) Omit shard_state"
                + (', or try "parameters"' if claimed == ELEMENTS else "")
            )
    return whole.gradients, ""


def _is_tried(parameter: Any) -> bool:
    return bool(parameter.is_floating_point() and parameter.numel())


def _updated(
    optimizer: Any,
    step: Callable[[Any], Any],
    claimed: str,
    like: Sequence[tuple[int, Any, str]],
    dtype: torch.dtype,
    n_owners: int,
    n_steps: int,
) -> list[_Outcome]:
    """Update small parameters, `like` those of the groups, in so many copies of the optimizer."""
    outcomes = []
    for owner in range(n_owners):
        trial, others = _copy(optimizer, dtype)
        parts = []
        made: set[str] = set()
        for i, (g, parameter, name) in enumerate(like):
            shape = _small(parameter)
            places = torch.arange(math.prod(shape), device=parameter.device).reshape(shape)
            if claimed == ELEMENTS and n_owners > 1:
                places = places.flatten().tensor_split(n_owners)[owner]
            elif i % n_owners != owner:
                continue
            if places.numel():
                part = _like(torch.sin(places + i), parameter, dtype)
                add_parameter(trial.param_groups[g], name, part)
                parts.append((i, part, places))
        for k in range(n_steps):
            for i, part, places in parts:
                # The first is orthogonal to the parameter, as are those of layers before a norm.
                grad = torch.sin((places ^ 1) + i) * (2 * (places % 2) - 1)
                if k > 0:  # their signs change, and they grow: some optimizers clip them
                    grad = torch.cos(places + 2 * i) * (1 + places) * torch.sin(places + 2.0 * k)
                part.grad = (grad * 2**k * (1 if i % 2 else 0.01)).to(dtype)
            for other in others:
                other.grad = torch.ones_like(other)
            given = [(part, part.grad.clone()) for _, part, _ in parts]
            step(trial)
            made |= {_made_of(gradient, part.grad) for part, gradient in given}
        numbers = {
            (g, key): _flat(x)
            for g, group in enumerate(trial.param_groups)
            for key, x in group.items()
            if isinstance(x, (int, float, torch.Tensor)) and group["params"]
        }
        own = {key: x for key, x in trial.state.items() if parts and isinstance(key, str)}
        state = {
            (i, key): (_flat(x), getattr(x, "shape", ()) == shape)
            for i, shape, kept in [
                *((i, part.shape, trial.state.get(part, {})) for i, part, _ in parts),
                (len(like), None, own),
            ]
            for key, x in Tree(kept, join=in_brackets).named
            if isinstance(x, (int, float))
            or (type(x) is torch.Tensor and x.layout is torch.strided and not x.is_complex())
        }
        values = {i: part.detach().flatten() for i, part, _ in parts}
        changes_others = any(not torch.equal(x, torch.ones_like(x)) for x in others)
        left = DROPPED if made == {DROPPED} else KEPT if made <= {KEPT} else CHANGED
        objects = {
            type(x).__name__
            for _, part, _ in parts
            for _, x in Tree(trial.state.get(part, {}), join=in_brackets).named
            if hasattr(x, "__dict__") and not isinstance(x, torch.Tensor) and not callable(x)
        }
        outcomes.append(_Outcome(changes_others, values, state, numbers, left, objects))
    return outcomes


def _made_of(gradient: Any, left: Any) -> str:
    """Return what a step has made of a gradient, of which this is left."""
    if left is None:
        return DROPPED
    return KEPT if torch.equal(gradient, left) else CHANGED


def _small(parameter: Any) -> list[int]:
    """Return the shape of one that is like a parameter, but has few elements."""
    return [min(n, round(_SIZE ** (1 / parameter.dim()))) for n in parameter.shape]


def _like(x: Any, parameter: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of that dtype, and otherwise like a parameter."""
    part = x.to(dtype)
    resemble(part, parameter)
    if hasattr(part, "grad_dtype"):
        part.grad_dtype = dtype
    return part


def _flat(x: Any) -> Any:
    x = x.detach().cpu() if isinstance(x, torch.Tensor) else x  # not every GPU has float64
    return torch.as_tensor(x, dtype=torch.float64).flatten()


def _copy(optimizer: Any, dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """Return a copy of an optimizer, without parameters, state and hooks; and these others.

    Where the optimizer refers to its parameters outside of param_groups, the copy refers to small
    ones, of ones, so that its steps do not change the user's.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known: dict[int, Any] = {
        id(p): _like(torch.ones(_small(p), device=p.device), p, dtype) for p in parameters
    }
    others = [known[id(p)] for p in filter(_is_tried, parameters)]
    trial = object.__new__(type(optimizer))
    left_out = ("step", "state", "param_groups", "_exchange")
    for key, x in vars(optimizer).items():
        if key not in left_out:
            with suppress(Exception):  # such as a generator, which step() may not need
                vars(trial)[key] = type(x)() if "hooks" in key else copy.deepcopy(x, known)
    trial.state = defaultdict(dict)
    for key, x in optimizer.state.items():
        if isinstance(key, str):  # of no parameter
            trial.state[key] = copy.deepcopy(x, known)
    trial.param_groups = []
    for group in optimizer.param_groups:
        options = copy.deepcopy(without_parameters(group), known)
        if "lr" in options and not options["lr"]:  # at the beginning of a warm-up
            options["lr"] = 1e-3
        trial.param_groups.append(options)
    return trial, others


def with_names(group: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the parameters of one of an optimizer's groups; with their names, if it has these."""
    return zip(group["params"], group.get("param_names") or repeat(""))  # noqa: B905


def without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with the same options, for `add_parameter`."""
    return {key: [] if key in OF_EACH else x for key, x in group.items()}


def add_parameter(group: dict[str, Any], name: str, parameter: Any) -> None:
    """Add a parameter to a group; with its name, if the others have theirs."""
    group["params"].append(parameter)
    if "param_names" in group:
        group["param_names"].append(name)


def resemble(piece: Any, parameter: Any) -> None:
    """Give a piece what optimizers may ask of a parameter: attributes, and whether it is frozen."""
    vars(piece).update(vars(parameter))
    piece.requires_grad_(parameter.requires_grad)
    if hasattr(parameter, "grad_dtype"):
        piece.grad_dtype = parameter.grad_dtype
