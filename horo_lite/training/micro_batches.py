"""Training with the same bits on any number of ranks.

A global batch consists of n micro-batches, however many ranks there are. Each rank computes the
gradients of some of them, one after the other, and all n gradients are added up in the order of one
tree (`summation_tree`), which depends on n alone. What else depends on a micro-batch, its samples
and random numbers, is a function of the seed, the step and the micro-batch's number, and the
running statistics of BatchNorm are those of the micro-batches in their order.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from horo_lite import context
from horo_lite.adapters import Adapter, adapter_of, changed, from_numpy, to_host
from horo_lite.adapters.object import Named, name_leaves, zero_gradients
from horo_lite.collectives.arrays import gpu_of
from horo_lite.collectives.calls import Compare, Part
from horo_lite.collectives.group import Group
from horo_lite.ops import allgather, ranks_of
from horo_lite.state.broadcast import is_same, is_writable
from horo_lite.state.trees import Tree, repeats
from horo_lite.state.wrapper import Sharing, wrapped
from horo_lite.training.data import Indices, length_of, non_negative, sample_order
from horo_lite.training.gradients import opened
from horo_lite.training.hyperparameters import hyperparameters_of
from horo_lite.training.summation_tree import (
    Flat,
    Subtree,
    are_siblings,
    leaves_of,
    merge,
    sum_of_all,
)

_ALIGNMENT = 64


class MicroBatch:
    """One of the micro-batches of a step.

    Attributes:
        step: The step's number.
        number: This one's, from 0 to n - 1.
        n: How many the step has, on all ranks together.
        seed: A number below 2^63 that depends on the seed, the step and the micro-batch, for
            example for `jax.random.key`.
        weight: How much its gradients count: set it to the number of samples if micro-batches have
            different numbers; `rows` and `samples` set it in proportion.
        gradients: Set this to the micro-batch's gradients, if MicroBatches has no optimizer.
    """

    def __init__(self, step: int, number: int, n: int, seed: int) -> None:
        self.step, self.number, self.n, self._seed = step, number, n, seed
        self.seed = seed_of(seed, step, number)
        self.weight = 1.0
        self.gradients: Any = None

    def __repr__(self) -> str:
        return f"<micro-batch {self.number} of {self.n}, step {self.step}>"

    @property
    def rng(self) -> np.random.Generator:
        """A new generator of NumPy, seeded with `seed`: for augmentation, for example."""
        return np.random.default_rng(self.seed)

    def rows(self, batch: Any) -> slice:
        """Return which rows of the global batch belong to this micro-batch.

        Args:
            batch: The global batch, or its length, at least n.
        """
        length = length_of(batch)
        if length < self.n:
            raise ValueError(f"a batch of {length} samples has none for some of the {self.n} parts")
        own = leaves_of(self.number, self.n, length)
        self.weight = len(own) * self.n / length  # 1 if all are equal
        return slice(own.start, own.stop)

    def samples(self, dataset: Any, batch_size: int, *, shuffle: bool = True) -> Indices:
        """Return the indices of this micro-batch's samples in a data set.

        Step after step, the global batches go through the data set, in another order in each epoch.
        An epoch has `len(dataset) // batch_size` steps; the samples that are left over are others
        in each.

        Args:
            dataset: The data set, or its length.
            batch_size: The length of the global batch, at least n.
            shuffle: Whether epochs have an order of their own, which depends on the seed.
        """
        length = length_of(dataset)
        if not self.n <= batch_size <= length:
            raise ValueError(
                f"batch_size={batch_size} must be at least {self.n}, the number of micro-batches, "
                f"and at most {length}, the number of samples"
            )
        epoch, step = divmod(self.step, length // batch_size)
        rows = self.rows(batch_size)
        first = step * batch_size
        order = _order(length, shuffle, self._seed, epoch)
        return order[first + rows.start : first + rows.stop].copy()


class MicroBatches:
    """Micro-batches whose averaged gradient has the same bits on any number of ranks.

        hvd.init(threads=1)
        micro_batches = hvd.MicroBatches(8, optimizer)
        for step in range(1000):
            for batch in micro_batches(step):               # this rank's, of the 8
                x, y = dataset[batch.samples(dataset, 64)]
                loss(model(x), y).backward()
            optimizer.step()

    Every rank makes one with the same arguments, and runs the loop in every step; each iteration
    computes the gradients of one micro-batch. When the loop has ended, the optimizer's gradients
    are the averages over all n, so clip and step as on one process. The optimizer itself is not
    wrapped: pass no DistributedOptimizer, which would average a second time.

    Before each iteration, gradients are cleared, if the optimizer has a method for that (otherwise
    clear them yourself), and the random generators of Python, NumPy and the optimizer's framework
    are seeded; after the last they are seeded alike on all ranks. If the loop is left by `break` or
    an exception, nothing is exchanged, gradients are cleared, and the step can be repeated.

    Without an optimizer, for gradients that functions return, as in JAX:

            for batch in micro_batches(step):
                batch.gradients = gradient(params, x[batch.rows(x)], jax.random.key(batch.seed))
            updates, state = tx.update(micro_batches.gradients, state)

    What it needs: the same number of threads in every run, hence `init(threads=…)`, on the same
    kind of processor, with the same libraries. The ranks compare these. Gradients are in host
    memory. See docs/reproducibility.md for what else can change bits.

    Costs: each addition reads two gradients and writes one. The ranks exchange the bytes of an
    all-reduce without compression if their number is a power of two; otherwise some have two or
    three partial sums to send.

    Args:
        n: The number of micro-batches, a power of two, at least the number of ranks. Results depend
            on it.
        optimizer: An optimizer whose parameters have gradients, of any framework; as for
            `DistributedOptimizer`.
        model: A PyTorch model whose BatchNorm layers compute running statistics; these are then
            updated as if one process had computed all micro-batches, one after the other.
        parameters: The parameters, if the optimizer does not show them: a list, a dict by name, or
            anything to iterate over.
        seed: For random numbers and the order of samples.
        group: The ranks; by default all.

    Raises:
        ValueError: `n` is no power of two, or smaller than the number of ranks (when a step begins,
            since ranks may join).
        RuntimeError: The number of threads is not given.
        MismatchError: In the loop, on every rank, if the ranks differ in steps, parameters,
            learning rates, threads, or in what their processors and libraries compute.
    """

    def __init__(
        self,
        n: int,
        optimizer: Any = None,
        *,
        model: Any = None,
        parameters: Any = None,
        seed: int = 0,
        group: Group | None = None,
    ) -> None:
        self.n = operator.index(n)
        if self.n < 1 or self.n & (self.n - 1):
            raise ValueError(
                f"the number of micro-batches must be a power of two, such as 8, not {n}: "
                "otherwise their sum would have no order that suits every number of ranks"
            )
        self._seed = non_negative("seed", seed)
        self._group = group
        self._source: _Source
        if optimizer is None:
            self._source = _Returned()
        else:
            if wrapped(optimizer) is not None or isinstance(optimizer, Sharing):
                raise TypeError(
                    "MicroBatches averages the gradients itself, and a DistributedOptimizer would "
                    "do so a second time: pass the optimizer, and call its step()"
                )
            self._source = _Held(optimizer, parameters)
        self._statistics = None if model is None else adapter_of(model).running_statistics(model)
        self._compared: tuple[Any, ...] = ()
        self._free: list[list[Flat]] = []
        self._done = -1

    @property
    def gradients(self) -> Any:
        """The averages of what the micro-batches of the last step set as their `gradients`."""
        if self._done < 0:
            raise RuntimeError(
                "there are no averages: a loop over the micro-batches of a step comes first, and "
                "must not be left before its end"
            )
        return self._source.result()

    def __call__(self, step: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of a step; then average the gradients. Collective."""
        step, self._done = non_negative("step", step), -1
        group = ranks_of(self._group)
        if group.size > self.n:
            raise ValueError(
                f"{self.n} micro-batches are too few for {group.size} ranks: use "
                f"MicroBatches({1 << (group.size - 1).bit_length()}) or fewer ranks"
            )
        try:
            yield from self._run(step, group)
        except BaseException:
            # Those of one micro-batch, with which a step would make the ranks diverge.
            self._source.clear()
            raise

    def _run(self, step: int, group: Group) -> Iterator[MicroBatch]:
        subtrees: list[Subtree] = []
        statistics: list[Flat] = []
        layout: _Layout | None = None
        if self._statistics is not None:
            self._statistics.begin()
        try:
            for number in leaves_of(group.rank, group.size, self.n):
                batch = MicroBatch(step, number, self.n, self._seed)
                self._source.clear()
                self._source.seed(batch.seed)
                yield batch
                named = self._source.named(batch)
                if layout is None or not layout.fits(named):
                    if layout is not None:
                        raise ValueError(_changed_layout(layout, named, batch))
                    layout = _Layout(named)
                leaf = Subtree(number, 1, [])
                is_right = bool(subtrees) and are_siblings(subtrees[-1], leaf)
                if is_right:
                    subtrees[-1].size = 2
                else:
                    leaf.sums = self._memory(layout)
                    subtrees.append(leaf)
                layout.add(subtrees[-1].sums, named, batch, is_first=not is_right)
                self._free += merge(subtrees)
                if self._statistics is not None:
                    statistics.append(self._statistics.take(batch))
        finally:
            if self._statistics is not None:
                self._statistics.end()
        assert layout is not None
        label = f"micro-batches of step {step}"
        self._compare(group, label, layout)
        totals = layout.total(sum_of_all(subtrees, self.n, group, label))
        if self._statistics is not None:
            self._statistics.fold(allgather(np.stack(statistics), name=label, group=group))
        self._source.put(totals)
        self._free += [subtree.sums for subtree in subtrees]
        self._source.seed(seed_of(self._seed, step, self.n))  # alike on all ranks
        self._done = step

    def _memory(self, layout: _Layout) -> list[Flat]:
        """Return memory for a gradient, if possible that of an earlier one."""
        while self._free:
            sums = self._free.pop()
            if [(x.dtype, x.size) for x in sums] == layout.sizes:
                return sums
        return [_aligned(n, dtype) for dtype, n in layout.sizes]

    def _compare(self, group: Group, label: str, layout: _Layout) -> None:
        """Raise MismatchError on every rank unless all are about to add up the same."""
        key = group, layout.texts
        if self._compared[:2] != key:
            found = _environment(self._source.adapter)
            self._compared = *key, "\n".join([*found, *layout.texts])
        rates = [
            f"{name} of group {i}: {np.float32(value)!r}"
            for name, i, value in self._source.hyperparameters()
        ]
        text = "\n".join([label, f"n={self.n}, seed={self._seed}", *rates, self._compared[2]])
        group.run(Compare(label, text), Part())


# The bits.


def seed_of(seed: int, step: int, number: int) -> int:
    """Return a number below 2^63 that depends on all three."""
    words = np.random.SeedSequence([seed, step, number]).generate_state(1, np.uint64)
    return int(words[0]) >> 1


@lru_cache(maxsize=2)
def _order(length: int, shuffle: bool, seed: int, epoch: int) -> Indices:
    return sample_order(length, shuffle, seed, epoch)


def _environment(adapter: Adapter) -> list[str]:
    """Describe what results depend on: threads, and what this processor and libraries compute."""
    threads = context.world().threads
    if threads is None:
        raise RuntimeError(
            "results depend on the number of threads, which by default is this rank's share of the "
            "cores, and so depends on the number of ranks: call hvd.init(threads=1), or set "
            "HORO_LITE_THREADS=1, in every run"
        )
    # Libraries that a rank has loaded for other purposes, such as plots, make no difference.
    others = {
        f"threads of {library['internal_api']}: {library['num_threads']}"
        for library in ThreadpoolController().info()
        if library["num_threads"] != threads
    }
    a, b = np.random.default_rng(0).standard_normal((2, 96, 96))
    single = a.astype(np.float32), b.astype(np.float32)
    arrays = [
        a @ b,
        single[0] @ single[1],
        np.exp(a),
        np.tanh(a).sum(0),
        *adapter.computed(*single),
    ]
    texts = [hashlib.sha256(x.tobytes()).hexdigest()[:8] for x in arrays]
    bits = f"bits of a test computation on this processor: {' '.join(texts)}"
    return [f"threads: {threads}", *sorted(others), bits]


class _Layout:
    """Where the elements of each gradient are in the arrays that are added up, one per dtype.

    The first array has the sum of the weights, and for each gradient how many micro-batches have
    it: one that is missing in all stays missing. Each gradient begins at a multiple of 64 bytes.
    Those of 16 bits are added up in float32: in float16, sums and weights would overflow.
    """

    def __init__(self, named: Sequence[_Gradient]) -> None:
        self.named = [(x.name, x.dtype, x.shape) for x in named]
        self.texts = [f"{name}: {dtype}{list(shape)}" for name, dtype, shape in self.named]
        ends: dict[np.dtype[Any], int] = {}
        self._places: list[tuple[np.dtype[Any], slice]] = []
        for _, dtype, shape in self.named:
            if dtype.itemsize == 2:
                dtype = np.dtype(np.float32)
            first, size = ends.get(dtype, 0), prod(shape)
            self._places.append((dtype, slice(first, first + size)))
            grain = max(1, _ALIGNMENT // dtype.itemsize)
            ends[dtype] = first + -(-size // grain) * grain
        self._which = {dtype: 1 + i for i, dtype in enumerate(ends)}
        counts = (np.dtype(np.float64), 1 + len(self.named))
        self.sizes: list[tuple[np.dtype[Any], int]] = [counts, *ends.items()]

    def fits(self, named: Sequence[_Gradient]) -> bool:
        return self.named == [(x.name, x.dtype, x.shape) for x in named]

    def _views(self, sums: Sequence[Flat]) -> Iterator[NDArray[Any]]:
        for (dtype, place), (_, _, shape) in zip(self._places, self.named, strict=True):
            yield sums[self._which[dtype]][place].reshape(shape)

    def add(
        self, sums: Sequence[Flat], named: Sequence[_Gradient], batch: MicroBatch, *, is_first: bool
    ) -> None:
        """Add the gradients of a micro-batch to sums, or if it `is_first`, overwrite them."""
        weight = float(batch.weight)
        if not 0 <= weight < np.inf:
            raise ValueError(f"{batch!r}: its weight must be 0 or more and finite, not {weight}")
        counts = np.array([weight, *(x.array is not None for x in named)])
        sums[0][:] = counts if is_first else sums[0] + counts
        for view, gradient in zip(self._views(sums), named, strict=True):
            array = gradient.array
            if array is None or not weight:
                if is_first:
                    view[...] = 0
                continue
            dtype = view.dtype
            if weight != 1:
                array = np.multiply(array, dtype.type(weight), dtype=dtype)
            # Adding 0 turns -0 into 0, as it is where a framework adds to gradients set to 0.
            np.add(array, dtype.type(0) if is_first else view, out=view, dtype=dtype)

    def total(self, sums: Sequence[Flat]) -> list[_Total | None]:
        """Return the total of each gradient, None if it is missing in all."""
        weight = float(sums[0][0])
        if not weight:
            raise ValueError("the weights of all micro-batches are 0")
        found = zip(self._views(sums), sums[0][1:], self.named, strict=True)
        return [_Total(x, weight, dtype) if n else None for x, n, (_, dtype, _) in found]


class _Total(NamedTuple):
    """The sum of a gradient over all micro-batches, in memory that is used again."""

    sum: NDArray[Any]
    weight: float
    dtype: np.dtype[Any]

    def average(self, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the average in memory of the gradient's dtype, by default new memory."""
        x = self.sum
        out = np.empty(x.shape, self.dtype) if out is None else out
        np.divide(x, x.dtype.type(self.weight), out=out, casting="unsafe")  # bfloat16 needs that
        return out


def _changed_layout(layout: _Layout, named: Sequence[_Gradient], batch: MicroBatch) -> str:
    texts = _Layout(named).texts
    pairs = [(a, b) for a, b in zip(layout.texts, texts, strict=False) if a != b]
    first = f": {pairs[0][0]}, then {pairs[0][1]}" if pairs else ""
    return (
        f"the gradients of {batch!r} differ in number, names, shapes or dtypes from those before it"
        f"{first}. All micro-batches of a step need the same ones: use zeros where one has none"
    )


def _aligned(n: int, dtype: np.dtype[Any]) -> Flat:
    """Return zeros at a multiple of 64 bytes."""
    memory = np.zeros(n * dtype.itemsize + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + n * dtype.itemsize].view(dtype)


# Where gradients come from, and where averages go.


@dataclass(slots=True, eq=False)
class _Gradient:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    array: NDArray[Any] | None


class _Source:
    """Where the gradients of micro-batches come from, and their averages go."""

    adapter = Adapter()

    def named(self, batch: MicroBatch) -> list[_Gradient]:
        """Return the gradients of a micro-batch, in their own memory."""
        raise NotImplementedError

    def put(self, totals: Sequence[_Total | None]) -> None:
        """Take the averages."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the averages in the form of the gradients."""
        raise NotImplementedError

    def clear(self) -> None:
        """Clear the gradients of the last micro-batch."""

    def hyperparameters(self) -> Iterable[tuple[str, int, float]]:
        """Return the numbers that the ranks compare: name, group, value."""
        return ()

    def seed(self, number: int) -> None:
        """Seed the random generators."""
        random.seed(number)
        np.random.seed(number % 2**32)


class _Held(_Source):
    """Gradients that parameters hold."""

    def __init__(self, optimizer: Any, parameters: Any) -> None:
        self._optimizer = optimizer
        self._finder: Adapter = adapter_of(optimizer)
        # A list or dict may be changed later: its current contents are used in each step.
        is_kept = parameters is None or isinstance(parameters, (list, tuple, Mapping))
        self._parameters = parameters if is_kept else list(parameters)
        named = self._named()
        kind = type(optimizer).__name__
        remedy = (
            "pass parameters=…, objects that hold gradients. If functions return gradients, as "
            "with JAX and Keras, pass no optimizer, and set batch.gradients in the loop"
        )
        if not named:
            raise ValueError(f"{kind} shows no parameters with gradients: {remedy}")
        is_known = type(self._finder) is not Adapter
        self.adapter = self._finder if is_known else adapter_of(named[0][1])
        for name, parameter in named:
            self.adapter.value(parameter)  # a lazy framework has them before seeds change
            if type(self.adapter).gradient is Adapter.gradient and not hasattr(parameter, "grad"):
                raise TypeError(f"parameter {name!r} of {kind} has no .grad: {remedy}")

    def _named(self) -> Named:
        if self._parameters is None:
            return self._finder.parameters(self._optimizer)
        return name_leaves(self._parameters, "parameters")

    def seed(self, number: int) -> None:
        super().seed(number)
        self.adapter.seed(number)

    def clear(self) -> None:
        zero_gradients(self._optimizer, self.adapter, self._named())

    def named(self, batch: MicroBatch) -> list[_Gradient]:
        named, adapter = self._named(), self.adapter
        adapter.compute([parameter for _, parameter in named])
        found = []
        for name, parameter in named:
            gradient = adapter.gradient(parameter)
            held = adapter.value(parameter) if gradient is None else to_host(gradient)
            array = _in_host_memory(held, name)
            found.append(
                _Gradient(name, array.dtype, array.shape, None if gradient is None else array)
            )
        return found

    def put(self, totals: Sequence[_Total | None]) -> None:
        adapter = self.adapter
        for (name, parameter), total in zip(self._named(), totals, strict=True):
            if total is None:
                continue
            x, again = adapter.gradient(parameter), adapter.gradient(parameter)
            memory = None if x is None else _in_host_memory(to_host(x), name)
            if memory is None or repeats(memory) or not is_writable(x) or not is_same(x, again):
                adapter.set_gradient(parameter, total.average())
            else:
                total.average(out=memory)
                changed([x])

    def result(self) -> Any:
        raise RuntimeError(
            "with an optimizer, its parameters hold the averaged gradients: call its step()"
        )

    def hyperparameters(self) -> Iterable[tuple[str, int, float]]:
        return hyperparameters_of(self._optimizer)


class _Returned(_Source):
    """Trees of gradients, which functions return."""

    _tree: Tree
    _leaves: list[Any]
    _averages: list[NDArray[Any] | None]

    def named(self, batch: MicroBatch) -> list[_Gradient]:
        if batch.gradients is None:
            raise RuntimeError(
                f"{batch!r} has no gradients: set batch.gradients in the loop, or pass "
                "MicroBatches an optimizer whose parameters hold them"
            )
        self._tree = Tree(batch.gradients, "gradients", opened=opened)
        named = [(name, leaf) for name, leaf in self._tree.named if leaf is not None]
        self._leaves = [leaf for _, leaf in self._tree.named]
        batch.gradients = None
        found = []
        for name, leaf in named:
            array = _in_host_memory(to_host(leaf), name)
            found.append(_Gradient(name, array.dtype, array.shape, array))
        return found

    def put(self, totals: Sequence[_Total | None]) -> None:
        self._averages = [None if total is None else total.average() for total in totals]

    def result(self) -> Any:
        averages = iter(self._averages)
        return self._tree.copied(
            None if leaf is None else from_numpy(next(averages), leaf)  # type: ignore[arg-type]
            for leaf in self._leaves
        )


def _in_host_memory(x: Any, name: str) -> NDArray[Any]:
    """Return an array as NumPy's; raise TypeError for what it cannot be."""
    where = "arrays in a GPU's memory"
    if gpu_of(x) is None:
        array = np.asarray(x)
        if array.dtype.kind in "fc" or array.dtype.name == "bfloat16":
            return array
        where = f"{array.dtype} arrays"
    raise TypeError(
        f"{name!r}: MicroBatches adds up gradients of floating-point numbers in host memory, not "
        f"{where}"
    )
