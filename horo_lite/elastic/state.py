"""The state of a training run, which can be saved, restored, and sent to other ranks."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np

from horo_lite import _native, checkpoint, context, ops
from horo_lite._native import Tensors
from horo_lite.adapters import adapter_of, from_numpy, to_host
from horo_lite.adapters.object import Passes, VariablesAdapter, is_array
from horo_lite.collectives.arrays import gpu_of
from horo_lite.elastic.sampler import Sampler
from horo_lite.errors import CheckpointError, HoroLiteError, in_one_line, say, warn
from horo_lite.state.broadcast import broadcast_content, is_writable
from horo_lite.state.optimizer_state import OptimizerState, load_state_dict, sharded_state
from horo_lite.state.trees import NUMBERS, Tree, in_brackets, mapped, overwritten, repeats
from horo_lite.state.wrapper import Wrapped, unwrapped, wrapped


class Progress(NamedTuple):
    """How far a rank has advanced; comparable, since ranks were in lockstep."""

    is_whole: bool  # whether all steps have been counted, and no optimizer's state is lost
    n_averaged: int  # steps of each `LocalSGD` up to its last average, which others may lack
    n_changes: int  # steps, assignments, records
    n_commits: int


class State:
    """Everything that training needs to continue: models, optimizers, samplers, arrays, counters.

        state = State(model=model, optimizer=opt, sampler=sampler, batch=0)
        state.batch += 1                        # attributes can be read and assigned

    Every rank creates one with the same names. Values are objects with `state_dict()` and
    `load_state_dict()`; modules and optimizers with an adapter; arrays of any framework, and lists,
    tuples and dicts of all these; and any other object that can be copied and pickled. Writable
    objects and arrays are changed in place, so that other references to them remain valid; others
    are replaced in the state: read them from there.

    `commit()` keeps a copy in memory, which `restore()` restores. `snapshot()` returns the content
    as one picklable object, which `load()` accepts. `sync()` makes all ranks equal.

    When ranks are lost, `run` continues from the most advanced survivor's state, and only the step
    in flight is lost; so count a batch (assign an attribute, record it in the sampler) right after
    its step, before any other communication. If a survivor was interrupted between the two, all
    go back to the last commit rather than train on a batch twice. A state with only models,
    optimizers and arrays counts nothing and never goes back, unless JAX has given arrays to the
    step that failed (`donate_argnums`), or that step had changed parameters (LBFGS).

    Gradients are not part of it: count and commit after a step, not after each of several backward
    passes. With `horo_lite.torch`, what was counted between them is taken back after a loss; an
    optimizer of your own cannot tell.

    checkpoint: the file to which rank 0 also writes each commit, so that a restarted job continues
    from there (HORO_LITE_CHECKPOINT; restarts set it). `run` reads it. The file is written
    atomically, and each commit waits for the disk: choose an interval at which this is negligible.

    write_in_background: whether commits only wait until the previous one is on the disk. A thread
    of rank 0 writes while training continues; a job that is killed meanwhile continues from the
    commit before. `flush()` waits for it, as do `run` and the end of the program; a write that has
    failed raises its OSError there, or in the next commit.
    """

    def __init__(
        self,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        write_in_background: bool = False,
        **things: Any,
    ) -> None:
        given = checkpoint or os.environ.get("HORO_LITE_CHECKPOINT")
        self._checkpoint = os.fspath(given) if given else None
        # The interpreter waits for its thread before it ends.
        self._writer = ThreadPoolExecutor(1, "horo_lite commit") if write_in_background else None
        self._writing: Future[None] | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._check_for_ranks: Callable[[], None] | None = None  # set by `run`
        self._n_commits = 0
        self._n_changes = 0
        self._n_at_count = 0
        # Optimizers that count their own steps, by attribute; and the steps that they had taken.
        self._steppers: dict[str, list[Wrapped]] = {}
        self._n_steps_before = 0
        self._adders: dict[str, list[Any]] = {}  # optimizers that know of passes before a step
        for name, value in things.items():
            setattr(self, name, value)
        self._n_steps_before = self._n_steps()
        self._counted()
        self.save()

    # Saving, restoring, sending.

    def snapshot(self) -> dict[str, Any]:
        """Return a picklable copy of the current content."""
        return self._content(_copy_of)

    def _content(self, take: Callable[[Any], Any]) -> dict[str, Any]:
        done: dict[int, Any] = {}
        return {name: _content(name, value, take, done) for name, value in self._things().items()}

    def load(self, snapshot: dict[str, Any]) -> None:
        """Set the content to that of the snapshot, which is not changed. On this rank only."""
        self._load(snapshot)
        for adapter, optimizer, passes in self._passes():
            n = passes.n % passes.n_per_step
            if n and not any(np.any(adapter.value(x)) for x in passes.sums):
                warn(
                    f"the state of this {type(optimizer).__name__} was saved in the middle of a "
                    f"step, after {n} of its passes, whose gradients are lost here, since each "
                    "rank has sums of its own: only the other passes will count. Commit after the "
                    "last one"
                )

    def _load(self, snapshot: dict[str, Any]) -> None:
        things, done = self._things(), dict[int, Any]()
        for name, content in snapshot.items():
            old = things.get(name)
            new = overwritten(old, content, _taken, done=done)
            if new is not old or name not in things:
                object.__setattr__(self, name, new)

    def save(self) -> None:
        """Keep a copy of the content in memory, which replaces the previous one."""
        self._keep(self.snapshot())

    def _keep(self, snapshot: dict[str, Any]) -> None:
        self._saved = snapshot
        # No part of a snapshot, which other ranks may load.
        self._saved_sums = {
            id(optimizer): [_copy_of(adapter.value(x)) for x in passes.sums]
            for adapter, optimizer, passes in self._passes()
        }

    def restore(self) -> None:
        """Restore the content of the last commit or sync. On this rank only.

        The gradients of DistributedOptimizers are cleared, since passes would add to those of a
        step that is taken back.
        """
        self._load(self._saved)
        for stepper in chain(*self._steppers.values()):
            stepper.begin_anew()
        for optimizer in chain(*self._adders.values()):
            optimizer.zero_grad()
            optimizer.watch()
        for adapter, optimizer, passes in self._passes():
            saved = self._saved_sums.get(id(optimizer), [])  # none before the first pass
            for variable, value in zip_longest(passes.sums, saved):
                zeros = np.zeros_like(adapter.value(variable))
                adapter.set_value(variable, zeros if value is None else value)

    def _passes(self) -> list[tuple[Any, Any, Passes]]:
        """Return the optimizers that add up gradients until a step, with their adapters."""
        leaves = [(adapter_of(leaf), leaf) for leaf in _leaves(self._things())]
        return [(a, leaf, found) for a, leaf in leaves if (found := a.passes(leaf))]

    def commit(self) -> None:
        """Save the content, for `restore()`.

        Every rank calls it at the same point, although none waits. Costs a copy of the content.
        """
        if self._is_between_passes():
            warn(
                "commit() between two backward passes of a step: gradients are not part of a "
                "commit, so those of the first passes are lost if training goes back to it, or a "
                "rank joins. Commit after step()"
            )
        self.save()
        self._n_commits += 1
        self._counted()
        try:
            self.write_checkpoint()
        except Exception as error:
            try:
                self.check_host_updates()  # the other ranks wait there
            except HoroLiteError:  # raised in place of `error`: a rank joins, or has been lost
                warn(f"rank 0 has not written its commit: {in_one_line(error)}")
                raise
            raise
        self.check_host_updates()

    def write_checkpoint(self) -> None:
        """Write the last saved content to the disk, on rank 0 if the state has a checkpoint."""
        if not self._checkpoint or context.rank() != 0:
            return
        if self._writer is None:
            checkpoint.save(self._checkpoint, self._saved)
        else:  # nothing changes what is saved: another commit replaces it
            self.flush()
            self._writing = self._writer.submit(checkpoint.save, self._checkpoint, self._saved)

    def flush(self) -> None:
        """Wait until the last commit is on the disk, if it is written in the background.

        Raises:
            OSError: It cannot be written; the previous one still exists.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def read_checkpoint(self) -> None:
        """Load the last commit from the disk, if there is one; on rank 0 only.

        Every rank calls it, followed by `sync()`; `run` does both.

        Raises:
            CheckpointError: The file cannot be read, or is not of this state.
        """
        if not self._checkpoint or context.rank() != 0:
            return
        self.flush()
        committed = checkpoint.saved_at(self._checkpoint)
        snapshot = checkpoint.load(self._checkpoint)
        if snapshot is None:
            return
        if snapshot.keys() != self._things().keys():
            raise CheckpointError(
                f"{self._checkpoint} is of another state: it contains {', '.join(snapshot)}, but "
                f"this state {', '.join(self._things())}. Use another path, or remove it to start "
                "from the beginning"
            )
        self.load(snapshot)
        at = time.strftime("%H:%M:%S", time.localtime(committed))
        say(f"continuing from the commit of {at} ({self._checkpoint})")

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, which `run` catches, if a rank waits to join.

        Every rank calls it, at the same point. `commit()` includes it.
        """
        if self._check_for_ranks is not None:
            self._check_for_ranks()

    def sync(self, root_rank: int = 0) -> None:
        """Give all ranks the content of rank `root_rank`, and save it for `restore()`.

        Collective; `run` calls it before training begins.
        """
        group = context.world().group
        is_root = group.rank == root_rank
        content, progress = broadcast_content(
            lambda: (self.snapshot(), self.progress()),
            root_rank,
            group,
            is_sharded=bool(self._shares()),
        )
        if is_root:
            for sampler in self._samplers():
                sampler.load_state_dict(sampler.state_dict())  # distribute the rest, as on others
        else:
            self.load(content)
        self._keep(content)
        self._n_commits = progress.n_commits + 1
        self._n_changes = progress.n_changes + 1 + self._n_steps_before - self._n_steps()
        self._counted()

    def is_alike(self) -> bool:
        """Return whether all ranks have the same content and progress; the same result on all.

        Collective. Only a hash is sent; arrays are read in place.
        """
        mine = self._digest(), self.progress()
        return len(set(ops.allgather_object(mine))) == 1

    def _digest(self) -> int:
        arrays: list[Any] = []

        def look(array: Any) -> tuple[str, ...]:
            arrays.append(array)
            return str(array.dtype), str(tuple(array.shape)), str(_strides(array))

        rest = _pickled(self._content(look))
        return _native.hash64(rest + repr(list(map(_hash_of, arrays))).encode())

    # Loss of ranks.

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register callbacks, called on every rank, in order, after each change of the world.

        They are called in the new world, with equal state on all ranks; use them, for example, to
        adapt a learning rate that depends on the number of ranks.
        """
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset the samplers, and call the callbacks."""
        for sampler in self._samplers():
            sampler.reset()
        for callback in self._callbacks:
            callback()

    def _samplers(self) -> list[Sampler]:
        return [leaf for leaf in _leaves(self._things()) if isinstance(leaf, Sampler)]

    def progress(self) -> Progress:
        """Return how far this rank has advanced since all were made equal.

        If it has lost arrays, it goes back to the last commit.
        """
        has_lost_arrays = self._has_lost_arrays()
        if has_lost_arrays:
            self.restore()
        counts = any(_is_counter(value) for value in self._things().values())
        n_changes = self._n_changes + self._n_steps() - self._n_steps_before
        is_counted = n_changes == self._n_at_count and not self._was_between_passes
        is_torn = self.has_lost_shares() or self._is_midway()
        is_whole = not is_torn and (not counts or is_counted)
        n_averaged = sum(one.averaged_at for one in self._averagers())
        return Progress(is_whole and not has_lost_arrays, n_averaged, n_changes, self._n_commits)

    def _has_lost_arrays(self) -> bool:
        """Return whether JAX has arrays without contents: of a step that failed, or given to it."""
        jax = sys.modules.get("jax")
        if jax is None:
            return False
        leaves = [x for leaf in _leaves(self._things()) for x in jax.tree.leaves(leaf)]
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        try:
            jax.block_until_ready(arrays)
        except RuntimeError:  # of deleted arrays, too
            return True
        return False

    def merge_ranks(self, root_rank: int, *, is_new: bool) -> None:
        """Have `LocalSGD` average what the ranks have learned, before they get the root's content.

        Collective.
        """
        for averager in self._averagers():
            averager.merge_ranks(root_rank, is_new=is_new)

    def _averagers(self) -> list[Any]:
        return [leaf for leaf in _leaves(self._things()) if hasattr(leaf, "merge_ranks")]

    def has_lost_shares(self) -> bool:
        """Return whether an optimizer's state was divided between ranks of an earlier world."""
        return any(state.is_lost for state in self._shares())

    def _shares(self) -> list[Any]:
        """Return the states of optimizers that are divided between the ranks."""
        found = map(sharded_state, _leaves(self._things()))
        return [state for state in found if state is not None]

    # Attributes.

    def _things(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name[0] != "_"}

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name[0] == "_":
            return
        own = weakref.ref(self)

        def changed(*_: object) -> None:
            if (state := own()) is not None:
                state._n_changes += 1

        def recorded() -> None:
            if (state := own()) is not None:
                state._n_changes += 1
                state._counted()

        steppers, adders = [], []
        for leaf in _leaves(value):
            if hasattr(leaf, "is_between_passes"):
                adders.append(leaf)
            if hasattr(leaf, "on_record"):
                leaf.on_record = recorded
            if stepper := wrapped(leaf):
                steppers.append(stepper)
            elif hasattr(leaf, "register_step_post_hook"):
                leaf.register_step_post_hook(changed)
        self._steppers[name], self._adders[name] = steppers, adders
        changed()
        if _is_counter(value):
            self._counted()

    def _counted(self) -> None:
        """Mark all changes up to now as counted."""
        self._n_at_count = self._n_changes + self._n_steps() - self._n_steps_before
        self._was_between_passes = self._is_between_passes()
        for optimizer in chain(*self._adders.values()):
            optimizer.watch()

    def _is_between_passes(self) -> bool:
        """Return whether gradients of counted passes are lost with this world."""
        return any(optimizer.is_between_passes for optimizer in chain(*self._adders.values()))

    def _is_midway(self) -> bool:
        """Return whether an optimizer has begun to change parameters, and was interrupted."""
        return any(one.is_midway for one in chain(*self._adders.values(), *self._steppers.values()))

    def _n_steps(self) -> int:
        return sum(stepper.n_steps for found in self._steppers.values() for stepper in found)


# One class serves as both; the names are Horovod's.
ObjectState = ArrayState = State


def _is_counter(value: Any) -> bool:
    """Return whether a value, neither model nor array, shows how far training has advanced."""
    kinds = (*NUMBERS, str, type(None))
    return all(isinstance(leaf, kinds) or hasattr(leaf, "on_record") for leaf in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists and tuples; or the value itself."""
    found: list[Any] = []
    mapped(value, found.append)
    return found


def _content(name: str, value: Any, take: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """Return the content of `value` as an independent, picklable object; arrays through `take`.

    For `_taken`, `take` must be `_copy_of`. `done` is that of `mapped`.
    """

    def content(x: Any) -> Any:
        if _has_state_dict(x):
            return mapped(dict(x.state_dict()), content)
        if is_array(x) or _is_variable(x):
            return take(x)
        if known := _Known(x):
            return mapped(known.content(), content)
        if hasattr(x, "num_replicas") or hasattr(x, "batch_sampler"):  # torch's
            raise TypeError(
                f"state.{name} is a {type(x).__name__} of this rank's samples, but all ranks would "
                "get rank 0's: pass an elastic.Sampler to the state, and to the loader; or create "
                "this object in the training function"
            )
        try:
            return copy.deepcopy(x)
        except Exception as error:
            places = Tree({name: value}, join=in_brackets).named
            place = next((place for place, y in places if y is x), name)
            raise TypeError(
                f"state.{place} is a {type(x).__name__}, which cannot be copied ({error}): pass "
                "its contents to the state, or an object with state_dict() and load_state_dict()"
            ) from error

    return mapped(value, content, done=done)


def _taken(old: Any, content: Any) -> Any:
    """Return `old`, or its replacement, with the content; it shares no memory with `content`."""
    if _has_state_dict(old):
        load_state_dict(old, copy.deepcopy(content))
        return old
    if is_array(old) or _is_variable(old):
        return _written(old, content) if is_array(content) else copy.deepcopy(content)
    if known := _Known(old):
        known.take(content)
        return old
    return copy.deepcopy(content)


def _has_state_dict(x: Any) -> bool:
    """Return whether the content is in `state_dict()`.

    That which torch gives to Keras' models has their seeds, too: each rank must have its own.
    """
    has_methods = hasattr(x, "state_dict") and hasattr(x, "load_state_dict")
    return has_methods and not isinstance(adapter_of(x), VariablesAdapter)


def _is_variable(x: Any) -> bool:
    """Return whether it is a variable of TensorFlow or Keras, whose arrays cannot be written."""
    return hasattr(x, "assign") and hasattr(x, "trainable") and hasattr(x, "shape")


def _hash_of(array: Any) -> int:
    if gpu_of(array) is None:
        # Unsupported dtypes, strides and layouts; torch's lazily conjugated or negated tensors.
        with suppress(TypeError, ValueError, BufferError, RuntimeError):
            return _native.fingerprints(Tensors([to_host(array)], writable=False))[0]
    return _native.hash64(_pickled(_copy_of(array)))


def _strides(array: Any) -> Any:
    if not hasattr(array, "stride"):
        return getattr(array, "strides", ())
    is_strided = array.layout == sys.modules["torch"].strided
    return array.stride() if is_strided else ()


def _pickled(content: Any) -> bytes:
    """Return bytes that are equal, on all ranks, for equal content."""
    written = io.BytesIO()
    pickler = _PicklerOfValues(written, pickle.HIGHEST_PROTOCOL)
    pickler.fast = True  # whether or not equal values are one object
    pickler.dump(content)
    return written.getvalue()


class _PicklerOfValues(pickle.Pickler):
    """Pickles the memory of torch's tensors by its contents; torch adds its address."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.storage.TypedStorage):
            return NotImplemented
        memory = torch.empty(0, dtype=torch.uint8).set_(obj._untyped_storage.cpu())
        return bytes, (memory.numpy().tobytes(),)


def _copy_of(array: Any) -> Any:
    """Return a copy in host memory, which any rank can use."""
    if hasattr(array, "detach"):
        return array.detach().cpu().clone()
    memory = to_host(array)
    # Not np.array(), which would keep the objects in an array of objects, and lose a mask.
    return copy.deepcopy(memory) if isinstance(memory, np.ndarray) else memory.get()  # CuPy


def _written(old: Any, content: Any) -> Any:
    """Return the array `old` with the copy's contents, or a new array if `old` does not fit."""
    fits = tuple(old.shape) == tuple(content.shape)
    if hasattr(content, "detach"):
        if not hasattr(old, "detach"):
            return content.clone()
        alike = fits and (old.dtype, old.layout) == (content.dtype, content.layout)
        if not alike or old.layout != sys.modules["torch"].strided or repeats(old):
            return content.to(old.device, copy=True)
        old.detach().copy_(content)
        return old
    if hasattr(old, "detach"):
        return copy.deepcopy(content)
    new = from_numpy(copy.deepcopy(content), old)
    if fits and _is_variable(old):
        old.assign(new)
        return old
    if new.dtype != content.dtype:  # JAX has rounded it to 32 bits
        return copy.deepcopy(content)
    if not fits or old.dtype != new.dtype:  # assignment would round it to the old dtype
        return new
    # NumPy arrays may have dtypes that the core does not know: here they are only copied.
    if isinstance(old, np.ndarray):
        keeps = isinstance(old, type(new))  # a mask would be lost in a plain array
        writes = keeps and old.flags.writeable and not repeats(old)
    else:
        writes = adapter_of(old).mutable and is_writable(old)
    if writes:
        old[...] = new
        return old
    return new


class _Known:
    """A module or optimizer without state_dict(), accessed through its adapter."""

    def __init__(self, obj: Any) -> None:
        self._obj, self._named = unwrapped(obj)
        adapter = adapter_of(self._obj)
        # The arrays of an optimizer whose state is divided are not all of it.
        self._is_divided = hasattr(self._obj, "is_sharded")
        steps = (getattr(self._obj, name, None) for name in adapter.steps)
        self._passes = adapter.passes(self._obj)
        self._steps = self._is_divided or bool(self._passes) or any(map(callable, steps))
        self._adapter = adapter_of(self._named[0][1]) if self._named else adapter
        self._whole = obj

    def __bool__(self) -> bool:
        return bool(self._named) or self._is_divided

    def content(self) -> Any:
        if self._steps:
            return OptimizerState(self._whole).read()
        return [self._adapter.value(parameter) for _, parameter in self._named]

    def take(self, content: Any) -> None:
        if self._steps:
            adapter, before = adapter_of(self._obj), self._passes
            sums = [_copy_of(adapter.value(x)) for x in before.sums] if before else []
            OptimizerState(self._whole).write(copy.deepcopy(content))
            now = adapter.passes(self._obj)
            if before and now and now.n == before.n:  # this rank's sums are of the same passes
                for variable, value in zip(now.sums, sums, strict=True):
                    adapter.set_value(variable, value)
            return
        for (_, parameter), copied in zip(self._named, content, strict=True):
            memory = self._adapter.value(parameter)
            if _written(memory, copied) is not memory:
                self._adapter.set_value(parameter, np.array(copied))
