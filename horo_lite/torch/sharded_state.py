"""shard_state=True: each rank has the optimizer's state of its share of the parameters only.

Gradients are averaged on all ranks, as without it. In step(), the optimizer sees the parameters
that this rank owns: for the duration of the call, its `param_groups` and `state` are replaced. What
it changes is then copied to all ranks, unless they share the parameters' memory
(shared_parameters.py). Parameters are cut, so that the shares are equal, if the
optimizer updates each element independently; the pieces are views of the parameters' memory.

Between steps the optimizer's `param_groups` are the user's. Its `state` is either whole, as before
the first step and after load_state_dict(), or a `ShardedState`. step() divides a whole one between
the ranks, and state_dict() makes it whole again on all of them, until the next step.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import compress
from operator import is_
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Max, Sum
from horo_lite.errors import warn
from horo_lite.ops import allreduce
from horo_lite.state.optimizer_state import in_host_memory
from horo_lite.state.trees import mapped
from horo_lite.state.wrapper import DividedState
from horo_lite.torch.exchange import IN_BACKWARD, GradientExchange
from horo_lite.torch.independence import (
    CHANGED,
    DROPPED,
    ELEMENTS,
    KEPT,
    OF_EACH,
    add_parameter,
    check_independent,
    resemble,
    what_is_independent,
    with_names,
    without_parameters,
)
from horo_lite.torch.shared_parameters import SharedParameters, share_parameters
from horo_lite.torch.slots import Slot, is_sparse
from horo_lite.torch.uncompiled import all_uncompiled
from horo_lite.training.closures import closure_of, returning, with_closure
from horo_lite.training.gradient_memory import tensors_of
from horo_lite.training.options import Options
from horo_lite.training.sharding import (
    Piece,
    changing,
    check_not_lost,
    check_not_torn,
    collected,
    compare_division,
    divide,
    receive,
)

_IS_SHARDED = (
    "the optimizer's state is sharded (shard_state=True): this rank has that of its share of the "
    "parameters only"
)
_USE_STATE_DICT = (
    "Call state_dict() on every rank, which returns all of it, and change it by load_state_dict()"
)


class ShardedState(DividedState):
    """Stands in for an optimizer's `state` while that is sharded, and says so to its readers."""

    _cannot_be_copied = (
        "an optimizer with shard_state=True cannot be copied or pickled after its first step, "
        "since this rank has a share of its state only: copy or save what its state_dict() returns"
    )

    def __init__(
        self,
        group: Group,
        parameters: Sequence[Any],
        pieces: Sequence[Piece],
        shared: SharedParameters | None,
    ) -> None:
        self.group = group
        self.parameters = parameters
        self.pieces = pieces
        self.shared = shared
        self.is_torn = False
        self.mine = [piece for piece in pieces if piece.owner == group.rank]
        self.own: defaultdict[Any, Any] = defaultdict(dict)
        """The state of this rank's pieces, by the tensor that the optimizer sees."""
        self.tensors: list[Any] = []
        """Of each of this rank's pieces: the parameter itself, or a view of a part of it."""
        self.views: list[Any] = []
        """Of each piece: a view in one dimension."""
        self.addresses: list[int] = []
        """Of each parameter, where the views are."""
        self.layouts = _layouts(parameters)
        owned = {piece.parameter for piece in pieces}
        self.left_out = [p for i, p in enumerate(parameters) if i not in owned]
        """Parameters that had neither a gradient nor state, and were frozen."""
        self.cut = [
            parameters[i] for i, start, stop, _ in pieces if stop - start < parameters[i].numel()
        ]
        """Parameters in pieces, which cannot be updated with a sparse gradient."""

    @property
    def _divided_between(self) -> Group:
        return self.group

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{_IS_SHARDED}. {_USE_STATE_DICT}")

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __len__ = _refuse
    get = setdefault = pop = popitem = update = clear = copy = _refuse

    def _nothing(self) -> Iterator[Any]:
        # No error, since Lightning iterates to move the state to the host when training has ended.
        warn(f"{_IS_SHARDED}, so iterating over it finds nothing. {_USE_STATE_DICT}")
        return iter(())

    __iter__ = items = keys = values = _nothing

    def __bool__(self) -> bool:
        """Return True: torch.distributed.checkpoint takes a step to create missing state."""
        return True

    def piece_of(self, piece: Piece) -> Any:
        """Return what the optimizer sees of a piece."""
        parameter = self.parameters[piece.parameter]
        if piece.stop - piece.start == parameter.numel():
            return parameter
        return _flat(parameter)[piece.start : piece.stop]

    def follow_parameters(self) -> None:
        """Make the views those of the parameters' current memory."""
        addresses = [parameter.data_ptr() for parameter in self.parameters]
        if addresses == self.addresses:
            return
        self.addresses = addresses
        flat = [_flat(parameter) for parameter in self.parameters]
        self.views = [flat[p.parameter][p.start : p.stop] for p in self.pieces]
        for piece, tensor in zip(self.mine, self.tensors, strict=True):
            if tensor is not self.parameters[piece.parameter]:
                tensor.data = self.piece_of(piece)


class _Average(NamedTuple):
    """A gradient of which each rank has the average in its share only."""

    slot: Slot
    gradient: Any
    version: int
    of_ranks: Sequence[tuple[int, int]]
    """Which elements each rank has."""


@all_uncompiled
class ShardedUpdate(GradientExchange):
    """Averages gradients, and updates on each rank only its share of the parameters."""

    def __init__(
        self, optimizer: Any, named: list[tuple[str, Any]] | None, options: Options
    ) -> None:
        self._is_tried = False
        self._leaves_gradients = KEPT
        self._independent = what_is_independent(optimizer, options.shard_state)
        # Optimizers of torch.optim update no parameter without a gradient.
        self._updates_all = isinstance(options.shard_state, str)
        bare = type(optimizer).step
        if getattr(bare, "hooked", False):
            bare = bare.__wrapped__
        own = weakref.ref(self)

        def update(wrapped: Any, *args: Any, **kwargs: Any) -> Any:
            exchange = own()
            assert exchange is not None
            return exchange._update(bare, wrapped, args, kwargs)

        # The hooks of step() see the parameters, all of them updated, and not this rank's pieces.
        self._update_with_hooks = torch.optim.Optimizer.profile_hook_step(update)
        super().__init__(optimizer, named, options)

        optimizer.register_state_dict_pre_hook(_collect, prepend=True)

    # Gradients of which each rank has the averages in its share only.

    @property
    def refuses_additions(self) -> bool:
        return super().refuses_additions or self.options.shard_gradients or self._updates_all

    def why_not_added_to(self, slot: Slot) -> str:
        if self.options.shard_gradients:
            return "with shard_gradients=True each rank has averages in its share of it only"
        if self._leaves_gradients == CHANGED and not slot.exchanged:
            return (
                f"step() of {self._base.__name__} has changed gradients, with shard_state this "
                "rank's share of them only"
            )
        return super().why_not_added_to(slot)

    def follow_world(self) -> None:
        super().follow_world()
        self._averages: list[_Average] = []
        self._shared: SharedParameters | None = None

    def begin(self, *, keeps_pending: bool = False) -> None:
        super().begin(keeps_pending=keeps_pending)
        self._averages = []

    def exchange(self, where: int = IN_BACKWARD) -> None:
        division = self.reducer.division
        before = {slot for slot in self.slots if slot.exchanged}
        super().exchange(where)
        new = {slot for slot in self.slots if slot.exchanged} - before
        self._averages = [average for average in self._averages if average.slot not in new]
        if division is not None:
            self._averages += [
                _Average(slot, gradient, gradient._version, division[slot.index])
                for slot in self.slots
                if slot in new
                and (gradient := slot.parameter.grad) is not None
                and not is_sparse(gradient)
            ]

    def _check_averages(self) -> None:
        for slot, gradient, version, _ in self._averages:
            now = slot.parameter.grad
            if now is not None and (now is not gradient or gradient._version != version):
                raise RuntimeError(
                    f"the gradient of {slot.name!r} was changed after backward(). With "
                    "shard_gradients=True, this rank has averages in its share of it only, so what "
                    "depends on its values, such as a norm, is another number on each rank: clip "
                    "by optimizer.clip_grad_norm_(), or omit shard_gradients"
                )

    def _complete_averages(self) -> None:
        """Give all ranks all averages, since the parameters are about to be divided again."""
        names, owners, parts, wholes = [], [], [], []
        for slot, gradient, _, of_ranks in self._averages:
            flat = gradient.detach().reshape(-1)
            if not gradient.is_contiguous():
                wholes.append((gradient, flat))
            for owner, (start, stop) in enumerate(of_ranks):
                if start != stop:
                    names.append(slot.name)
                    owners.append(owner)
                    parts.append(flat[start:stop])
        if parts:
            receive(self._group, f"averages for {self._label}", owners, names, parts)
        for gradient, flat in wholes:
            gradient.detach().copy_(flat.view(gradient.shape))
        self._averages = []

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        if self.options.shard_gradients and not norm_type > 0:
            raise ValueError(
                f"with shard_gradients=True, norm_type must be more than 0, not {norm_type}: "
                "the ranks compute a norm of their shares, and then one of these numbers"
            )
        self.flush()
        if not self._averages:
            return super().clip(max_norm, norm_type, error_if_nonfinite)
        self._check_averages()
        rank = self._group.rank
        divided = {id(average.gradient): average.of_ranks[rank] for average in self._averages}
        gradients = [p.grad for p in self._seen if p.grad is not None]
        mine, norms = [], []
        for gradient in gradients:
            part = gradient.detach()
            if id(gradient) in divided:
                start, stop = divided[id(gradient)]
                if start == stop:
                    continue
                part = part.reshape(-1)[start:stop]
            mine.append(gradient.detach())
            norm = torch.linalg.vector_norm(part, norm_type)
            # What was not exchanged in this step is the same on all ranks, and counts once.
            norms.append(norm if rank == 0 or id(gradient) in divided else torch.zeros(()))
        is_largest = norm_type == math.inf
        own = np.array([norm.item() for norm in norms])
        with np.errstate(over="ignore"):
            own = own.max(initial=0.0) if is_largest else (own**norm_type).sum()
            found = allreduce(
                np.array([own]),
                op=Max if is_largest else Sum,
                name=f"norm of the gradients for {self._label}",
                group=self._group,
            )[0]
            total = float(found if is_largest else found ** (1 / norm_type))
        if error_if_nonfinite and not math.isfinite(total):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total}, so they cannot be "
                "clipped: omit error_if_nonfinite to scale them anyway"
            )
        factor = max_norm / (total + 1e-6)
        for gradient in mine:
            gradient.mul_(min(factor, 1.0) if factor == factor else factor)
        self._averages = [
            average._replace(version=average.gradient._version) for average in self._averages
        ]
        dtypes = [gradient.real.dtype for gradient in gradients]
        return torch.tensor(total, dtype=reduce(torch.promote_types, dtypes) if dtypes else None)

    def check_scaling(self, is_fused: bool) -> None:
        if self.takes_part and self.options.shard_gradients:
            raise RuntimeError(
                "GradScaler does not go with shard_gradients=True: it would look for inf in this "
                "rank's share of the averages only, and each rank would decide separately whether "
                "to skip the step. Omit shard_gradients, or use bfloat16 without a GradScaler"
            )
        super().check_scaling(is_fused)

    # A step.

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        drops = self._leaves_gradients == DROPPED  # this rank, those of its share
        if drops or (self.options.shard_gradients and self.group is not None):
            # The next pass must not add to them. Each time, and in a world of one, too, so that a
            # program without zero_grad() computes the same on any number of ranks.
            for _, parameter in self._parameters():
                parameter.grad = None
        return result

    def take_step(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._update_with_hooks(step.__self__, *args, **kwargs)

    def _update(
        self, step: Callable[..., Any], optimizer: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Update this rank's share of the parameters, and receive the others'."""
        closure = closure_of(args, kwargs)
        if closure is not None:
            # Called here, since it may use the optimizer as the user knows it.
            with torch.enable_grad():
                loss = closure()
            args, kwargs = with_closure(lambda: loss, args, kwargs)
        self._check_averages()
        state = self._shard(lambda trial: step(trial, *args, **kwargs))
        state.follow_parameters()
        changes = [self._updates_all or p.grad is not None for p in state.parameters]
        if state.shared is not None:
            names = [slot.name for slot in self.slots]
            state.shared.begin_update(self._group, self._label, names, changes)
        with changing(state):
            with self._within_share(state):
                if closure is not None:
                    own = returning(loss, lambda: [tensor.detach() for tensor in state.tensors])
                    args, kwargs = with_closure(own, args, kwargs)
                result = step(optimizer, *args, **kwargs)
            self._receive(state, changes)
        return result if closure is None else loss

    @contextmanager
    def _within_share(self, state: ShardedState) -> Iterator[None]:
        """Let the optimizer see this rank's share, its gradients and state, inside the block."""
        optimizer, parameters = self._optimizer, state.parameters
        groups = optimizer.param_groups
        shares = [without_parameters(group) for group in groups]
        place = {
            id(p): (share, name)
            for group, share in zip(groups, shares, strict=True)
            for p, name in with_names(group)
        }
        pieces = []
        for piece, tensor in zip(state.mine, state.tensors, strict=True):
            parameter = parameters[piece.parameter]
            add_parameter(*place[id(parameter)], tensor)
            if tensor is not parameter:
                pieces.append(tensor)
                gradient = parameter.grad
                if gradient is not None:
                    gradient = gradient.detach().reshape(-1)[piece.start : piece.stop]
                resemble(tensor, parameter)
                tensor.grad = gradient
        before = optimizer.state
        optimizer.param_groups, optimizer.state = shares, state.own
        try:
            yield
        finally:
            optimizer.param_groups, optimizer.state = groups, state
            if before is not state:
                # An optimizer around this one may keep it as its own state: saving that fails now.
                before.clear()
                before["sharded"] = state
            for group, share in zip(groups, shares, strict=True):  # some write into their options
                group.update({key: x for key, x in share.items() if key not in OF_EACH})
            for tensor in pieces:
                tensor.grad = None

    def _receive(self, state: ShardedState, changes: Sequence[bool]) -> None:
        """Give all ranks the parameters that their owners may have changed."""
        sent = [
            i
            for i, piece in enumerate(state.pieces)
            if changes[piece.parameter]
            and (state.shared is None or state.shared.receives(piece.parameter))
        ]
        if sent:
            pieces = [state.pieces[i] for i in sent]
            names = [self.slots[piece.parameter].name for piece in pieces]
            owners = [piece.owner for piece in pieces]
            receive(self._group, self._label, owners, names, [state.views[i] for i in sent])
        # What a rank receives from other hosts, it writes to memory of others, too.
        if state.shared is not None and not (sent and state.shared.is_of_all):
            self._group.agree(f"{self._label}, after the update", "")
        for parameter in compress(state.parameters, changes):
            # It may be saved for a backward(), which must not use the new values.
            torch.autograd.graph.increment_version(parameter)
        if state.shared is not None:
            state.shared.note_versions()

    @property
    def _label(self) -> str:
        return f"parameters of optimizer {self.reducer.number}, {self.position}"

    @property
    def _group(self) -> Group:
        assert self.group is not None
        return self.group

    # Dividing and collecting the state.

    def _shard(self, step: Callable[[Any], Any]) -> ShardedState:
        """Return the sharded state, after dividing it if it is whole. Collective in that case.

        The optimizer has it when `_within_share` ends. `step` is that of a copy to be tried.
        """
        state = self._optimizer.state
        parameters = [slot.parameter for slot in self.slots]
        if isinstance(state, ShardedState):
            check_not_torn(state)
            if (
                _layouts(parameters) == state.layouts
                and all(map(is_, parameters, state.parameters))
                and all(p.grad is None for p in state.left_out)
                and not any(is_sparse(p.grad) for p in state.cut)
                and (state.shared is None or state.shared.are_there())
            ):
                check_not_lost(state.group, self.group)
                return state
            self.collect()
            state = self._optimizer.state
        self._complete_averages()
        self._check_shardable()
        claimed = self.options.shard_state
        if isinstance(claimed, str) and not self._is_tried:
            self._leaves_gradients, why = check_independent(self._optimizer, step, claimed)
            if why and self._group.rank == 0:
                warn(why)
        self._is_tried = True
        has_state = [bool(state.get(p)) for p in parameters]
        takes_part = [
            p.requires_grad or p.grad is not None or has
            for p, has in zip(parameters, has_state, strict=True)
        ]
        may_cut = [
            self._independent == ELEMENTS and p.is_contiguous() and not is_sparse(p.grad)
            for p in parameters
        ]
        chosen = [i for i, takes in enumerate(takes_part) if takes]
        pieces = [
            piece._replace(parameter=chosen[piece.parameter])
            for piece in divide(
                [parameters[i].numel() for i in chosen],
                [may_cut[i] for i in chosen],
                self._group.size,
            )
        ]
        self._compare(pieces)
        if self.options.shared_parameters:
            self._shared = share_parameters(self._group, parameters, self._shared, self)
        sharded = ShardedState(self._group, parameters, pieces, self._shared)
        group_of = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for piece in sharded.mine:
            tensor, parameter = sharded.piece_of(piece), parameters[piece.parameter]
            sharded.tensors.append(tensor)
            if parameter in state:
                group = group_of[id(parameter)]
                sharded.own[tensor] = _cut(state[parameter], parameter, piece, group)
        known = set(map(id, parameters))
        sharded.own.update({key: x for key, x in state.items() if id(key) not in known})
        # What sparse_as_dense makes sparse again has its non-zero elements where the averages are.
        if self.options.shard_gradients and not self.options.sparse_as_dense:
            self.reducer.division = _division(pieces, parameters, self._group.size)
        return sharded

    def _compare(self, pieces: Sequence[Piece]) -> None:
        """Raise on every rank unless all have the same parameters and state, dealt in one way."""
        names = [slot.name for slot in self.slots]
        label = f"division of the state of optimizer {self.reducer.number}"
        dealt = [
            f"{names[i]!r}, elements {start} to {stop}, strides {self.slots[i].parameter.stride()}:"
            f" rank {owner}"
            for i, start, stop, owner in pieces
        ]
        how = f"{self._base.__name__} by {self._independent}"
        named = [(slot.name, slot.parameter) for slot in self.slots]
        state = {slot.name: self._optimizer.state.get(slot.parameter) for slot in self.slots}
        compare_division(self._group, label, [how, *dealt], named, lambda: state)

    def _check_shardable(self) -> None:
        """Raise ValueError for parameters that cannot be dealt to ranks."""
        for slot in self.slots:
            layout = slot.parameter.layout
            if layout is not torch.strided or slot.parameter.is_meta:
                what = "without memory" if slot.parameter.is_meta else str(layout)
                raise ValueError(
                    f"shard_state=True needs parameters with memory of their own, but "
                    f"{slot.name!r} is {what}: leave it out of the optimizer, or omit shard_state"
                )
            if slot.parameter.numel() and not _is_dense(slot.parameter):
                raise ValueError(
                    f"shard_state=True needs parameters without gaps in memory, but {slot.name!r} "
                    f"has strides {slot.parameter.stride()} for {list(slot.parameter.shape)}: "
                    "create it from a contiguous tensor"
                )
        slots = self.slots
        for i, k, *_ in tensors_of([_flat(slot.parameter) for slot in slots]).overlaps():
            raise ValueError(
                f"shard_state=True needs parameters that share no memory, but {slots[i].name!r} "
                f"and {slots[k].name!r} do: use one parameter in both places"
            )

    def collect(self) -> None:
        """Make a sharded state whole, in host memory. Collective in that case."""
        state = self._optimizer.state
        if not isinstance(state, ShardedState):
            return
        check_not_torn(state)
        check_not_lost(state.group, self.group)
        pairs = zip(state.mine, state.tensors, strict=True)
        mine = {piece: in_host_memory(state.own[t]) for piece, t in pairs if t in state.own}
        label = f"state_dict() of optimizer {self.reducer.number}, with shard_state=True"
        of_piece = collected(self._group, label, mine)
        of_parameter: dict[int, list[Any]] = {}
        for piece in sorted(of_piece):
            of_parameter.setdefault(piece.parameter, []).append(of_piece[piece])
        whole: defaultdict[Any, Any] = defaultdict(dict)
        for i, parts in of_parameter.items():
            whole[state.parameters[i]] = _joined(parts, state.parameters[i])
        known = set(map(id, state.tensors))
        whole.update({key: x for key, x in state.own.items() if id(key) not in known})
        self._optimizer.state = whole


def _collect(optimizer: Any) -> None:
    """Make the optimizer's state whole, for its state_dict()."""
    exchange = vars(optimizer).get("_exchange")
    if isinstance(exchange, ShardedUpdate):
        exchange.collect()
        # A script that removes a parameter cannot remove its state, as torch demands.
        groups = optimizer.param_groups
        present = {id(parameter) for group in groups for parameter in group["params"]}
        for key in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
            if id(key) not in present:
                del optimizer.state[key]
    elif isinstance(optimizer.state, ShardedState):
        raise RuntimeError(
            f"{_IS_SHARDED}, and its DistributedOptimizer, which collects it, no longer exists: "
            "wrap it again with shard_state=True, or call state_dict() on every rank before that"
        )


def _division(
    pieces: Sequence[Piece], parameters: Sequence[Any], n_ranks: int
) -> list[list[tuple[int, int]]]:
    """Return which elements of each parameter belong to each rank: all to one, if to none."""
    division = [[(0, 0)] * n_ranks for _ in parameters]
    for i, start, stop, owner in pieces:
        division[i][owner] = start, stop
    for i in set(range(len(parameters))) - {piece.parameter for piece in pieces}:
        division[i][0] = 0, parameters[i].numel()
    return division


def _is_dense(tensor: Any) -> bool:
    """Return whether the elements are next to each other in memory, in any order of dimensions."""
    n_elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != n_elements:
            return False
        n_elements *= size
    return True


def _layouts(parameters: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    size, stride = torch.Tensor.size, torch.Tensor.stride
    return list(map(size, parameters)), list(map(stride, parameters))


def _flat(parameter: Any) -> Any:
    """Return a view of a parameter without gaps, in one dimension, in memory order."""
    detached = parameter.detach()
    return detached.as_strided((detached.numel(),), (1,))


def _cut(
    state: dict[str, Any], parameter: Any, piece: Piece, group: dict[str, Any]
) -> dict[str, Any]:
    """Return a copy of the part of a parameter's state that belongs to a piece.

    On the parameter's device, except a count of steps that is neither captured nor read by a fused
    step, as torch's load_state_dict() does it: `collect` has moved all of it to the host.
    """
    is_whole = piece.stop - piece.start == parameter.numel()
    counts_there = bool(group.get("capturable") or group.get("fused"))
    done: dict[int, Any] = {}

    def cut(x: Any, moves: bool) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not is_whole and x.shape == parameter.shape:
            x = x.reshape(-1)[piece.start : piece.stop]
        return x.to(parameter.device if moves else x.device, copy=True)

    return {
        key: mapped(x, partial(cut, moves=key != "step" or counts_there), done=done)
        for key, x in state.items()
    }


def _joined(parts: Sequence[Any], parameter: Any) -> Any:
    """Return the state of a parameter, of which these are the states of its pieces, in order."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts], parameter) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(each, parameter) for each in zip(*parts, strict=True))
    is_cut = len(parts) > 1 and isinstance(first, torch.Tensor) and first.dim() == 1
    if not is_cut or sum(part.numel() for part in parts) != parameter.numel():
        return first
    return torch.cat(list(parts)).reshape(parameter.shape)
