"""Operations among ranks as one JAX primitive: what they do eagerly, when traced and in between.

What was traced runs in the order of the program on every rank, across jitted functions and among
the iterations of loops: the primitive has JAX's effect of ordered input and output, whose token
XLA must hand from each to the next, and JAX from each dispatched computation to the next. So calls
inside jit are matched among the ranks by their position, as direct calls are, but through the
engine: XLA runs them when it gets there, and a direct call of the training thread meanwhile must
not meet one of them.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from horo_lite import _native
from horo_lite.collectives import Average, Group, Handle, Op, Sum
from horo_lite.compression import Compression, Compressor

Array = Any  # jax.Array, traced or not; NumPy's where it is said


@dataclass(frozen=True)
class Call(ABC):
    """One operation, as far as it is known when a function is traced. Equal ones are one."""

    name: str | None
    group: Group | None

    in_place: ClassVar[bool]
    """Whether the results are what `start` leaves in its arrays."""

    elementwise: ClassVar[bool] = False
    """Whether it may be done with several cases side by side, as vmap has them."""

    def ranks(self) -> Group:
        return ranks_of(self.group)

    @abstractmethod
    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        """The results, of the kind that `xs` are."""

    @abstractmethod
    def start(self, xs: list[Any], name: str) -> Handle:
        """The operation on NumPy arrays is submitted under that name."""

    def results(self, xs: Sequence[Any]) -> list[Any]:
        """The results' shapes and dtypes, from those of `xs`."""
        return list(xs)

    def title(self, i: int) -> str:
        """What messages call the array `i`."""
        return f"{type(self).__name__.lower()} {self.name or ''}".rstrip()

    @abstractmethod
    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        """The inputs' cotangents. NotImplementedError where the operation is not linear."""

    def run(self, xs: Sequence[Any]) -> list[Any]:
        """The results, when XLA gets there; called by one of its threads, with NumPy arrays."""
        try:
            group = self.ranks()
            number = f"call {group.new_number('inside jit')} inside jit"
            handle = self.start(list(xs), f"{self.name}, {number}" if self.name else number)
            result = group.synchronize(handle, beside=True)
        except BaseException as error:
            _raised.append(error)
            raise
        return list(self.results(xs)) if self.in_place else [result]


@dataclass(frozen=True)
class Allreduce(Call):
    op: Op = Average
    compression: Compressor = Compression.none
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    names: tuple[str, ...] = ()  # of the arrays
    weighted: bool = False  # the last input is the weight

    in_place = True
    elementwise = True

    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        arrays, options = self._given(xs)
        return self.ranks().grouped_allreduce(arrays, self.op, name=self.name, **options)

    def start(self, xs: list[Any], name: str) -> Handle:
        arrays, options = self._given(xs)
        return self.ranks().grouped_allreduce_async_(arrays, self.op, name=name, **options)

    def results(self, xs: Sequence[Any]) -> list[Any]:
        return list(xs[:-1]) if self.weighted else list(xs)

    def title(self, i: int) -> str:
        return super().title(i) + (f", {self.names[i]!r}" if i < len(self.names) else "")

    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        if self.op not in (Average, Sum) or self.weighted:
            what = "with a weight" if self.weighted else f"with op {self.op.name}"
            raise NotImplementedError(f"allreduce {what} has no gradient")
        return bind(self, cotangents)

    def _given(self, xs: Sequence[Array]) -> tuple[Sequence[Array], dict[str, Any]]:
        weight = float(xs[-1]) if self.weighted else None
        if weight is not None and not 0 <= weight < float("inf"):
            raise ValueError(f"weight is a number of samples, 0 or more, not {weight}")
        return xs[:-1] if self.weighted else xs, {
            "compression": self.compression,
            "prescale_factor": self.prescale_factor,
            "postscale_factor": self.postscale_factor,
            "names": self.names,
            "weight": weight,
        }


@dataclass(frozen=True)
class Broadcast(Call):
    root_rank: int

    in_place = True
    elementwise = True

    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        return [self.ranks().broadcast(x, self.root_rank, name=self.name) for x in xs]

    def start(self, xs: list[Any], name: str) -> Handle:
        return self.ranks().broadcast_async_(xs[0], self.root_rank, name=name)

    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        sums = bind(Allreduce(self.name, self.group, op=Sum), cotangents)
        is_root = self.ranks().rank == self.root_rank
        return sums if is_root else [jnp.zeros_like(x) for x in sums]


@dataclass(frozen=True)
class Allgather(Call):
    in_place = False

    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        return [self.ranks().allgather(x, name=self.name) for x in xs]

    def start(self, xs: list[Any], name: str) -> Handle:
        rows = len(xs[0]) if xs[0].ndim else 1
        return self.ranks().allgather_async(xs[0], name=f"{name}, {rows} rows of each rank")

    def results(self, xs: Sequence[Any]) -> list[Any]:
        (x,) = xs
        rows, *row = x.shape or (1,)
        return [jax.ShapeDtypeStruct((rows * self.ranks().size, *row), x.dtype)]

    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        (sum_,) = bind(Allreduce(self.name, self.group, op=Sum), cotangents)
        rank, size = self.ranks().rank, self.ranks().size
        return [jnp.split(sum_, size)[rank]]


@dataclass(frozen=True)
class Alltoall(Call):
    in_place = False

    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        return [self.ranks().alltoall(x, name=self.name) for x in xs]

    def start(self, xs: list[Any], name: str) -> Handle:
        return self.ranks().alltoall_async(xs[0], name=name)

    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        return bind(self, cotangents)


def ranks_of(group: Group | None) -> Group:
    if group is not None:
        return group
    from horo_lite.world import world

    return world().group


def bind(call: Call, xs: Sequence[Array]) -> list[Array]:
    """The results of the operation: at once, or, where something is traced, when it is run."""
    _begin_anew()
    if any(isinstance(x, jax.core.Tracer) for x in xs):
        return list(_primitive.bind(*map(jnp.asarray, xs), call=call))
    return call.eagerly(xs)


_raised: list[BaseException] = []
"""What operations inside jit have raised, of which JAX tells the text only."""


def cause_of(error: BaseException) -> BaseException | None:
    """What an operation inside jit raised (MismatchError, PeerLostError, …), behind JAX's error.

        try:
            params, state = step(params, state, batch)
            jax.block_until_ready(params)
        except jax.errors.JaxRuntimeError as error:
            if isinstance(hvd.cause_of(error), hvd.PeerLostError): ...

    None if `error` comes from something else.
    """
    return next((cause for cause in reversed(_raised) if _in_words(cause) in str(error)), None)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _begin_anew() -> None:
    """After an error functions with operations can be run again.

    Without this JAX would hand the error on to all of them, through the token that orders them. It
    is done where something is traced or an operation called outside jit, on that thread.
    """
    global _n_seen
    if len(_raised) > _n_seen:
        _n_seen = len(_raised)
        with suppress(ImportError, AttributeError):  # no public name
            from jax._src.dispatch import runtime_tokens

            runtime_tokens.clear()


_n_seen = 0
_primitive = Primitive("horo_lite")
_primitive.multiple_results = True
_primitive.def_impl(lambda *xs, call: call.eagerly(xs))


def _through_callback(call: Call, *xs: Array) -> Sequence[Array]:
    """The operation on copies in the host's memory, in a callback of JAX's."""

    def run(*arrays: Any) -> list[Any]:
        return call.run([np.array(x) if call.in_place else np.asarray(x) for x in arrays])

    return io_callback(run, call.results(xs), *xs, ordered=True)  # type: ignore[no-any-return]


# JAX has no public name for the effect that keeps calls in order, but it shows it.
(_IN_ORDER,) = jax.make_jaxpr(lambda: io_callback(print, None, ordered=True))().effects


@_primitive.def_effectful_abstract_eval  # type: ignore[untyped-decorator]
def _results(*xs: Any, call: Call) -> Any:
    for i, x in enumerate(xs):
        if not (x.dtype == jnp.bfloat16 or getattr(x.dtype, "kind", "") in "biuf"):
            raise TypeError(
                f"{call.title(i)}: dtype {x.dtype} cannot be reduced or sent: use integers, bool, "
                "or float16/bfloat16/float32/float64"
            )
    shapes = call.results(xs)
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes], {_IN_ORDER}


_lower_to_callback = mlir.lower_fun(
    lambda *xs, call: _through_callback(call, *xs), multiple_results=True
)


class _Traced(NamedTuple):
    """What a compiled program calls by its number here."""

    call: Call
    inputs: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


_traced: list[_Traced] = []
_numbers: dict[_Traced, int] = {}


def _lower_to_xla(ctx: mlir.LoweringRuleContext, *xs: Any, call: Call) -> Any:
    """A call of XLA's, with the program's own memory; the token keeps it in its place."""
    shapes = [tuple((x.shape, x.dtype) for x in xs) for xs in (ctx.avals_in, ctx.avals_out)]
    traced = _Traced(call, *shapes)
    if traced not in _numbers:
        _numbers[traced] = len(_traced)
        _traced.append(traced)
    copies = len(ctx.avals_out) if call.in_place else 0
    lower = jax.ffi.ffi_lowering(
        _NAME,
        has_side_effect=True,
        operand_output_aliases={i: i for i in range(1, 1 + copies)},
    )
    token, *results = lower(
        ctx.replace(avals_in=[_TOKEN, *ctx.avals_in], avals_out=[_TOKEN, *ctx.avals_out]),
        ctx.tokens_in.get(_IN_ORDER),
        *xs,
        call=np.int64(_numbers[traced]),
        copies=np.int64(copies),
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_IN_ORDER: token})))
    return results


def _run(number: int, inputs: list[memoryview], results: list[memoryview]) -> str | None:
    """What `Call.run` does, on XLA's memory; what went wrong, if something did."""
    try:
        traced = _traced[number]
        xs, ys = (
            [np.ndarray(*shape, view) for shape, view in zip(shapes, views, strict=True)]
            for shapes, views in ((traced.inputs, inputs), (traced.results, results))
        )
        if traced.call.in_place:
            traced.call.run([*ys, *xs[len(ys) :]])
        else:
            for y, result in zip(ys, traced.call.run(xs), strict=True):
                y[...] = result
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _in_words(error)
    return None


def inside_jit() -> str:
    """How operations inside jit reach the ranks from a CPU: through "xla", or a "callback".

    As custom calls of XLA's they work on the program's own memory. If the XLA here has an interface
    that is not known, or HORO_LITE_INSIDE_JIT says so, they are callbacks, as they are on GPUs and
    TPUs: their inputs and results are copied through the host's memory.
    """
    wanted = os.environ.get("HORO_LITE_INSIDE_JIT") or "xla"
    if wanted not in ("xla", "callback"):
        raise ValueError(f"HORO_LITE_INSIDE_JIT={wanted}: it is xla or callback")
    return "xla" if wanted == "xla" and _xla_calls() else "callback"


@cache
def _xla_calls() -> bool:
    """XLA calls `_run` under our name. False if it is not known how."""
    jax.devices("cpu")  # before that nothing is registered, whatever is said
    with suppress(Exception):  # whatever it may be, there are callbacks
        header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
        major, minor = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header)
        handler = _native.xla_handler(_run, (int(major), int(minor)))
        if handler is not None:
            jax.ffi.register_ffi_target(_NAME, handler, platform="cpu")
            return True
    return False


def _lower_on_cpu(ctx: mlir.LoweringRuleContext, *xs: Any, call: Call) -> Any:
    return (_lower_to_xla if inside_jit() == "xla" else _lower_to_callback)(ctx, *xs, call=call)


_NAME = "horo_lite"
(_TOKEN,) = jax.make_jaxpr(jax.lax.create_token)().out_avals
mlir.register_lowering(_primitive, _lower_to_callback)
mlir.register_lowering(_primitive, _lower_on_cpu, platform="cpu")


def _jvp(xs: Sequence[Array], tangents: Sequence[Array], *, call: Call) -> Any:
    results = _primitive.bind(*xs, call=call)
    return results, _primitive.bind(*map(ad.instantiate_zeros, tangents), call=call)


def _transpose(cotangents: Sequence[Array], *xs: Any, call: Call) -> list[Array]:
    given = call.transposed([ad.instantiate_zeros(x) for x in cotangents])
    return [x.reshape(linear.aval.shape) for x, linear in zip(given, xs, strict=True)]


def _batch(xs: Sequence[Array], axes: Sequence[int | None], *, call: Call) -> Any:
    if not call.elementwise:
        raise NotImplementedError(
            f"{type(call).__name__.lower()} inside vmap: call it outside, on the whole batch"
        )
    return _primitive.bind(*xs, call=call), axes


ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
