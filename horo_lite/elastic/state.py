"""What a training run consists of, so that it can be kept, taken back, and given to other ranks."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from horo_lite import _native, checkpoint, context, ops
from horo_lite._native import Tensors
from horo_lite.adapters import adapter_of, from_numpy, to_host
from horo_lite.adapters.object import is_array
from horo_lite.collectives.arrays import gpu_of
from horo_lite.elastic.sampler import Sampler
from horo_lite.errors import CheckpointError
from horo_lite.state.broadcast import is_writable
from horo_lite.state.optimizer_state import OptimizerState
from horo_lite.state.trees import NUMBERS, Tree, in_brackets, mapped, overwritten
from horo_lite.state.wrapper import Wrapped, unwrapped, wrapped


class Progress(NamedTuple):
    """How far a rank is. The larger the further: ranks were in lockstep."""

    is_whole: bool  # no step that nothing has counted
    n_changes: int  # steps, assignments, records
    n_commits: int


class State:
    """Everything that training needs to go on: models, optimizers, samplers, arrays, counters.

        state = State(model=model, optimizer=opt, sampler=sampler, batch=0)
        state.batch += 1                        # attributes, to be read and assigned

    Every rank makes one with the same names. Values are objects with `state_dict()` and
    `load_state_dict()`; modules and optimizers that an adapter knows; arrays of any framework,
    and lists, tuples and dicts of all these; and any other object that can be copied and pickled.
    Objects and arrays that can be written are kept and written, so that other references to them
    stay good; what cannot be is replaced in the state: read it from there.

    `commit()` keeps a copy in memory, to which `restore()` goes back. `snapshot()` gives the
    content as one object that can be pickled, `load()` takes it. `sync()` makes all ranks equal.

    When ranks are lost, `run` goes on from where the most advanced survivor is, and nothing is
    lost but the step in flight; so count a batch (assign an attribute, record it in the sampler)
    right after its step, before anything else that communicates. Where a survivor was caught
    between the two, all go back to the last commit rather than do a batch twice. A state that
    has nothing but models, optimizers and arrays counts nothing and never goes back.

    checkpoint: the file to which rank 0 also writes each commit, so that a job started again goes
    on from there (HORO_LITE_CHECKPOINT; restarts set it). `run` reads it. The file is written
    whole or not at all, and waits for the disk: commit so often that this does not matter.
    """

    def __init__(self, *, checkpoint: str | os.PathLike[str] | None = None, **things: Any) -> None:
        given = checkpoint or os.environ.get("HORO_LITE_CHECKPOINT")
        self._checkpoint = os.fspath(given) if given else None
        self._callbacks: list[Callable[[], None]] = []
        self._check_for_ranks: Callable[[], None] | None = None  # set by `run`
        self._n_commits = 0
        self._n_changes = 0
        self._n_at_count = 0
        # Optimizers that count their own steps, by attribute; and how many they had made before.
        self._steppers: dict[str, list[Wrapped]] = {}
        self._n_steps_before = 0
        for name, value in things.items():
            setattr(self, name, value)
        self._n_steps_before = self._n_steps()
        self._counted()
        self._saved = self.snapshot()

    # Kept, taken back, moved.

    def snapshot(self) -> dict[str, Any]:
        """The content now, independent of the state and ready to be pickled."""
        return self._content(_copy_of)

    def _content(self, take: Callable[[Any], Any]) -> dict[str, Any]:
        return {name: _content(name, value, take) for name, value in self._things().items()}

    def load(self, snapshot: dict[str, Any]) -> None:
        """The content is that of the snapshot, which can be used again. On this rank only."""
        things = self._things()
        for name, content in snapshot.items():
            old = things.get(name)
            new = overwritten(old, content, _taken)
            if new is not old or name not in things:
                object.__setattr__(self, name, new)

    def save(self) -> None:
        """A copy of the content is kept in memory, in place of the one before."""
        self._saved = self.snapshot()

    def restore(self) -> None:
        """The content is what it was at the last commit or sync. On this rank only."""
        self.load(self._saved)

    def commit(self) -> None:
        """The content now is what `restore()` goes back to.

        Every rank calls it at the same place, though nobody waits. Costs a copy of the content.
        """
        self.save()
        self.write_checkpoint()
        self._n_commits += 1
        self._counted()
        self.check_host_updates()

    def write_checkpoint(self) -> None:
        """What was saved last is on the disk, if the state has a checkpoint; rank 0 writes it."""
        if self._checkpoint and context.rank() == 0:
            checkpoint.save(self._checkpoint, self._saved)

    def read_checkpoint(self) -> None:
        """The content is that of the last commit on the disk, if there is one; on rank 0 alone.

        Every rank calls it, and `sync()` after it; `run` has done both. CheckpointError: what is
        there cannot be read, or does not fit this state.
        """
        if not self._checkpoint or context.rank() != 0:
            return
        committed = checkpoint.saved_at(self._checkpoint)
        snapshot = checkpoint.load(self._checkpoint)
        if snapshot is None:
            return
        if snapshot.keys() != self._things().keys():
            raise CheckpointError(
                f"{self._checkpoint} is of another state: it holds {', '.join(snapshot)}, and this "
                f"state {', '.join(self._things())}. Give another path, or remove it to begin anew"
            )
        self.load(snapshot)
        at = time.strftime("%H:%M:%S", time.localtime(committed))
        print(
            f"[horo_lite] going on from the commit of {at} ({self._checkpoint})",
            file=sys.stderr,
            flush=True,
        )

    def check_host_updates(self) -> None:
        """HostsUpdatedInterrupt, which `run` catches, where a rank waits to join.

        Every rank calls it, at the same place. `commit()` does.
        """
        if self._check_for_ranks is not None:
            self._check_for_ranks()

    def sync(self, root_rank: int = 0) -> None:
        """All ranks have the content of that rank, and this is what `restore()` goes back to.

        Collective; `run` calls it before training begins.
        """
        group = context.world().group
        is_root = group.rank == root_rank
        mine = (self.snapshot(), self.progress()) if is_root else None
        received = ops.broadcast_object(mine, root_rank, group=group)
        assert received is not None
        content, progress = received
        if is_root:
            for sampler in self._samplers():
                sampler.load_state_dict(sampler.state_dict())  # deals out the rest, as the others'
        else:
            self.load(content)
        self._saved = content
        self._n_commits = progress.n_commits + 1
        self._n_changes = progress.n_changes + 1 + self._n_steps_before - self._n_steps()
        self._counted()

    def is_alike(self) -> bool:
        """Whether all ranks have the same content and are equally far: the same answer on all.

        Collective. Reads arrays where they lie, and nothing but a hash travels.
        """
        mine = self._digest(), self.progress()
        return len(set(ops.allgather_object(mine))) == 1

    def _digest(self) -> int:
        arrays: list[Any] = []

        def look(array: Any) -> tuple[str, ...]:
            arrays.append(array)
            strides = array.stride() if hasattr(array, "stride") else getattr(array, "strides", ())
            return str(array.dtype), str(tuple(array.shape)), str(strides)

        rest = io.BytesIO()
        pickler = pickle.Pickler(rest, pickle.HIGHEST_PROTOCOL)
        pickler.fast = True  # alike for values that are, whether or not they are one object
        pickler.dump(self._content(look))
        return _native.hash64(rest.getvalue() + repr(list(map(_hash_of, arrays))).encode())

    # What happens when ranks were lost.

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """These are called on every rank, in order, whenever the world has become another.

        The world is the new one then, and the state is equal on all ranks; a learning rate that
        followed the number of ranks is adapted here.
        """
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The samplers deal out anew, and the callbacks have been called."""
        for sampler in self._samplers():
            sampler.reset()
        for callback in self._callbacks:
            callback()

    def _samplers(self) -> list[Sampler]:
        return [leaf for leaf in _leaves(self._things()) if isinstance(leaf, Sampler)]

    def progress(self) -> Progress:
        """How far this rank is since all were made equal."""
        counts = any(_is_counter(value) for value in self._things().values())
        n_changes = self._n_changes + self._n_steps() - self._n_steps_before
        return Progress(not counts or n_changes == self._n_at_count, n_changes, self._n_commits)

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

        steppers = []
        for leaf in _leaves(value):
            if hasattr(leaf, "on_record"):
                leaf.on_record = recorded
            if stepper := wrapped(leaf):
                steppers.append(stepper)
            elif hasattr(leaf, "register_step_post_hook"):
                leaf.register_step_post_hook(changed)
        self._steppers[name] = steppers
        changed()
        if _is_counter(value):
            self._counted()

    def _counted(self) -> None:
        """Whatever has changed up to now is accounted for."""
        self._n_at_count = self._n_changes + self._n_steps() - self._n_steps_before

    def _n_steps(self) -> int:
        return sum(stepper.n_steps for found in self._steppers.values() for stepper in found)


# One class holds both; the names are Horovod's.
ObjectState = ArrayState = State


def _is_counter(value: Any) -> bool:
    """Neither model nor array: what tells how far training is."""
    kinds = (*NUMBERS, str, type(None))
    return all(isinstance(leaf, kinds) or hasattr(leaf, "on_record") for leaf in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    """What dicts, lists and tuples hold, however deep; or the value itself."""
    found: list[Any] = []
    mapped(value, found.append)
    return found


def _content(name: str, value: Any, take: Callable[[Any], Any]) -> Any:
    """What `value` holds, as an object of its own that can be pickled; of arrays, what `take` says.

    `take` is `_copy_of` for what `_taken` is to understand.
    """

    def content(x: Any) -> Any:
        if hasattr(x, "state_dict") and hasattr(x, "load_state_dict"):
            return mapped(dict(x.state_dict()), content)
        if is_array(x) or _is_variable(x):
            return take(x)
        if known := _Known(x):
            return mapped(known.content(), content)
        if hasattr(x, "num_replicas") or hasattr(x, "batch_sampler"):  # torch's
            raise TypeError(
                f"state.{name} is a {type(x).__name__} of this rank's samples, and all ranks would "
                "get rank 0's: give the state an elastic.Sampler, and the loader that sampler; or "
                "make this one in the function that trains"
            )
        try:
            return copy.deepcopy(x)
        except Exception as error:
            places = Tree({name: value}, join=in_brackets).named
            place = next((place for place, y in places if y is x), name)
            raise TypeError(
                f"state.{place} is a {type(x).__name__}, which cannot be copied ({error}): give "
                "the state what it holds, or an object with state_dict() and load_state_dict()"
            ) from error

    return mapped(value, content)


def _taken(old: Any, content: Any) -> Any:
    """`old`, or what replaces it, holding the content; neither shares memory with `content`."""
    if hasattr(old, "state_dict") and hasattr(old, "load_state_dict"):
        old.load_state_dict(copy.deepcopy(content))
        return old
    if (is_array(old) or _is_variable(old)) and is_array(content):
        return _written(old, content)
    if known := _Known(old):
        known.take(content)
        return old
    return copy.deepcopy(content)


def _is_variable(x: Any) -> bool:
    """Whether it is one of TensorFlow's or Keras': they hold arrays that cannot be written."""
    return hasattr(x, "assign") and hasattr(x, "trainable") and hasattr(x, "shape")


def _hash_of(array: Any) -> int:
    if gpu_of(array) is None:
        with suppress(TypeError, ValueError, BufferError):  # dtypes and strides beyond the core
            return _native.fingerprints(Tensors([to_host(array)], writable=False))[0]
    return _native.hash64(pickle.dumps(_copy_of(array)))


def _copy_of(array: Any) -> Any:
    """A copy in the host's memory, for any rank to take."""
    if hasattr(array, "detach"):
        return array.detach().cpu().clone()
    memory = to_host(array)
    return np.array(memory) if isinstance(memory, np.ndarray) else memory.get()  # CuPy


def _written(old: Any, content: Any) -> Any:
    """The array `old` if it can hold that copy, else a new one of its kind."""
    fits = tuple(old.shape) == tuple(content.shape)
    if hasattr(old, "detach"):
        if not fits:
            return content.clone()
        old.detach().copy_(content)
        return old
    new = from_numpy(np.array(content), old)
    if fits and _is_variable(old):
        old.assign(new)
        return old
    if not fits or old.dtype != new.dtype:  # assigned, it would be rounded to the old dtype
        return new
    # NumPy's may be of dtypes that the core does not know: here they only have to be kept.
    numpys = isinstance(old, np.ndarray)
    if old.flags.writeable if numpys else adapter_of(old).mutable and is_writable(old):
        old[...] = new
        return old
    return new


class _Known:
    """A module or optimizer that has no state_dict(), by its adapter."""

    def __init__(self, obj: Any) -> None:
        self._obj, self._named = unwrapped(obj)
        adapter = adapter_of(self._obj)
        self._steps = any(callable(getattr(self._obj, name, None)) for name in adapter.steps)
        self._adapter = adapter_of(self._named[0][1]) if self._named else adapter
        self._whole = obj

    def __bool__(self) -> bool:
        return bool(self._named)

    def content(self) -> Any:
        if self._steps:
            return OptimizerState(self._whole).read()
        return [self._adapter.value(parameter) for _, parameter in self._named]

    def take(self, content: Any) -> None:
        if self._steps:
            OptimizerState(self._whole).write(copy.deepcopy(content))
            return
        for (_, parameter), copied in zip(self._named, content, strict=True):
            memory = self._adapter.value(parameter)
            if _written(memory, copied) is not memory:
                self._adapter.set_value(parameter, np.array(copied))
