"""What an optimizer updates independently of what: known of torch's, claimed of others, and tried.

With shard_state, a rank's optimizer sees its share of the parameters only. One that combines them,
as by the norm of all gradients, would then compute something else on each rank, without an error.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from horo_lite.errors import warn

ELEMENTS = "elements"
PARAMETERS = "parameters"
_INDEPENDENT = {
    **dict.fromkeys(
        ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
         "Rprop", "SGD"),
        ELEMENTS,
    ),
    **dict.fromkeys(("Adafactor", "Muon", "SparseAdam"), PARAMETERS),
}  # fmt: skip
"""What torch's optimizers update independently of each other."""
_N_STEPS = 8  # D-Adaptation and Prodigy look at all parameters, but not in the first steps
_N_TRIED = 6  # parameters of a group
_ROUNDING = 1e-6  # of the largest element; most results are equal


def what_is_independent(optimizer: Any, given: bool | str) -> str:
    """Return what the optimizer updates independently: elements, or parameters."""
    kind = type(optimizer)
    if not {"param_groups", "state"} <= vars(optimizer).keys():
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


def check_independent(optimizer: Any, step: Callable[[Any], Any], claimed: str) -> None:
    """Raise ValueError if the optimizer does not update independently what is claimed.

    Tried on a copy of it, with small parameters, which are updated together, and then by two copies
    of which each has one half.

    Args:
        optimizer: Before its first step.
        step: Its step(), without hooks.
        claimed: ELEMENTS or PARAMETERS.
    """
    name = type(optimizer).__name__
    try:
        with torch.random.fork_rng(devices=[]):
            together, options = _updated(optimizer, step, claimed, 1)
            in_halves, options_of_halves = _updated(optimizer, step, claimed, 2)
    except Exception as error:
        warn(
            f"shard_state={claimed!r}: {name} could not be tried with small parameters "
            f"({type(error).__name__}: {error}). If its update of some depends on other {claimed}, "
            "they will not be what they are without shard_state"
        )
        return
    others = [*in_halves, *options_of_halves]
    for (what, one), (_, other) in zip([*together, *options, *options], others, strict=True):
        rounding = _ROUNDING * float(one.abs().max()) if one.numel() else 0.0
        if not torch.allclose(one, other, rtol=0, atol=rounding, equal_nan=True):
            raise ValueError(
                f"shard_state={claimed!r} is not true of {name}: what step() makes of {what} "
                f"depends on other {claimed}, or on random numbers. (Two copies of the optimizer, "
                "of which each had one half of some small parameters, came to another result than "
                "one with all.) Omit shard_state"
                + (', or try "parameters"' if claimed == ELEMENTS else "")
            )


_Named = list[tuple[str, Any]]


def _updated(
    optimizer: Any, step: Callable[[Any], Any], claimed: str, n_owners: int
) -> tuple[_Named, _Named]:
    """Return small parameters after some updates, of which each owner makes its part.

    And what is a number in the options of each owner.
    """
    small = [
        (g, parameter)
        for g, group in enumerate(optimizer.param_groups)
        for parameter in [p for p in group["params"] if p.is_floating_point()][:_N_TRIED]
    ]
    parts: list[list[Any]] = [[] for _ in small]
    options: _Named = []
    for owner in range(n_owners):
        trial = _copy(optimizer)
        gradients = []
        for i, (g, parameter) in enumerate(small):
            shape = [min(n, 4) for n in parameter.shape]
            value = torch.arange(math.prod(shape), device=parameter.device).reshape(shape)
            if claimed == ELEMENTS and n_owners > 1:
                value = value.flatten().tensor_split(n_owners)[owner]
            elif i % n_owners != owner:
                continue
            part = torch.sin(value + i)
            resemble(part, parameter)
            trial.param_groups[g]["params"].append(part)
            parts[i].append(part)
            gradients.append((i, part, value))
        for k in range(_N_STEPS):
            for i, part, value in gradients:  # large and small ones, which change differently
                size = (1 if i % 2 else 0.01) * (1 + value)
                part.grad = torch.cos(value + 2.0 * i) * size * (1.5 + torch.sin(value + 2.0 * k))
            step(trial)
        options += [
            (f"its {key!r}", torch.as_tensor(x, dtype=torch.float64))
            for group in trial.param_groups
            for key, x in group.items()
            if isinstance(x, (int, float, torch.Tensor))
        ]
    kinds = [f"a parameter of shape {list(parameter.shape)}" for _, parameter in small]
    values = [torch.cat([part.detach().flatten() for part in each]) for each in parts]
    return list(zip(kinds, values, strict=True)), options


def _copy(optimizer: Any) -> Any:
    """Return a copy of an optimizer, without parameters, state and hooks."""
    known = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trial = object.__new__(type(optimizer))
    left_out = ("step", "state", "param_groups", "_exchange")
    for key, x in vars(optimizer).items():
        if key not in left_out:
            vars(trial)[key] = type(x)() if "hooks" in key else copy.deepcopy(x, known)
    trial.state = defaultdict(dict)
    trial.param_groups = []
    for group in optimizer.param_groups:
        options = {key: x for key, x in group.items() if key not in ("params", "param_names")}
        options = copy.deepcopy(options, known)
        if "lr" in options and not options["lr"]:  # at the beginning of a warm-up
            options["lr"] = 1e-3
        trial.param_groups.append({**options, "params": []})
    return trial


def resemble(piece: Any, parameter: Any) -> None:
    """Give a piece what optimizers may ask of a parameter: attributes, and whether it is frozen."""
    vars(piece).update(vars(parameter))
    piece.requires_grad_(parameter.requires_grad)
    if hasattr(parameter, "grad_dtype"):
        piece.grad_dtype = parameter.grad_dtype
