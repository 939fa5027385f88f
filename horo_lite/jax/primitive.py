"""Operations between ranks as one JAX primitive, in eager and traced code.

Traced calls run in program order on every rank, across jitted functions and the iterations of
loops: the primitive has JAX's effect for ordered input and output, whose token XLA must pass from
each call to the next, and JAX from each dispatched computation to the next. So calls inside jit are
matched between ranks by position, like blocking calls, and not by the order of tracing: ranks may
compile a different number of times. But the progress thread runs them, since XLA may execute them
at any time: they must not be matched with a blocking call of the training thread.

XLA calls the handler in csrc/bindings/xla.cpp with the addresses of its buffers; arguments and
results share memory wherever XLA can arrange it. Of an error it passes on the text only (`cause_of`
returns the exception). JAX runs compiled functions asynchronously, so `join()`, `shutdown()` and
the end of the program wait first for those in progress (`context.on_ending`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from horo_lite import _native
from horo_lite.errors import behind, in_words, raised_in_graphs, warn

if TYPE_CHECKING:
    from horo_lite.jax.calls import Call

Array = Any  # jax.Array, traced or not; a NumPy array where stated


def bind(call: Call, xs: Sequence[Array]) -> list[Array]:
    """Return the results of the operation: executed now or, if anything is traced, later."""
    _begin_anew()
    if is_traced(xs):
        return list(_primitive.bind(*map(jnp.asarray, xs), call=call))
    return call.eagerly(xs)


def is_traced(xs: Sequence[Array]) -> bool:
    """Return whether an operation on `xs` must run later: while jit traces, also on constants.

    If it ran now, only those ranks would take part that happen to trace the function again.
    """
    return any(isinstance(x, jax.core.Tracer) for x in (*xs, _probe.bind()))


def cause_of(error: BaseException) -> BaseException | None:
    """Return the error of an operation inside jit (MismatchError, …) that caused JAX's error.

        try:
            params, state = step(params, state, batch)
            jax.block_until_ready(params)
        except jax.errors.JaxRuntimeError as error:
            if isinstance(hvd.cause_of(error), hvd.PeerLostError): ...

    None if `error` has another cause.
    """
    return behind(error)


def complete() -> None:
    """Wait for the compiled functions in progress, whose operations need the world.

    Raises:
        HoroLiteError: An operation has failed meanwhile. Earlier errors were the program's to see.
    """
    before = _last_error()
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        error = _last_error()
        if error is not None and error is not before:
            raise error from None


def _last_error() -> BaseException | None:
    return raised_in_graphs[-1] if raised_in_graphs else None


def _begin_anew() -> None:
    """Let functions with operations run again after an error.

    Otherwise JAX would pass the error on to all of them, through the token that orders them. Called
    on the thread that traces a function or calls an operation outside jit.
    """
    global _seen
    last = _last_error()
    if last is not _seen:
        _seen = last
        with suppress(ImportError, AttributeError):  # not a public name
            from jax._src.dispatch import runtime_tokens

            runtime_tokens.clear()


_seen: BaseException | None = None
_probe = Primitive("horo_lite_probe")
_probe.def_impl(bool)
_probe.def_abstract_eval(lambda: jax.core.ShapedArray((), bool))
mlir.register_lowering(_probe, mlir.lower_fun(lambda: jnp.zeros((), bool), multiple_results=False))
_primitive = Primitive("horo_lite")
_primitive.multiple_results = True
_primitive.def_impl(lambda *xs, call: call.eagerly(xs))


def _through_callback(call: Call, xs: Sequence[Array]) -> Sequence[Array]:
    """Perform the operation in a callback of JAX, on copies in host memory.

    Parameters would be copied there in every step, and are not compared.
    """
    call, xs = call.without_parameters(xs)

    def run(*arrays: Any) -> list[Any]:
        return call.run([np.array(x) if call.in_place else np.asarray(x) for x in arrays])

    return io_callback(run, call.results(xs), *xs, ordered=True)


# JAX has no public name for the effect that keeps calls in order, but a jaxpr contains it.
(_IN_ORDER,) = jax.make_jaxpr(lambda: io_callback(print, None, ordered=True))().effects


@_primitive.def_effectful_abstract_eval
def _results(*xs: Any, call: Call) -> Any:
    for i, x in enumerate(xs):
        if not is_sendable(x.dtype):
            raise TypeError(
                f"{call.title(i)}: dtype {x.dtype} cannot be reduced or sent inside jit: use "
                "integers, bool, or float16/bfloat16/float32/float64"
            )
    call.check(xs)
    shapes = call.results(xs)
    weak = [x.weak_type for x in xs]  # a Python number remains weakly typed, for promotion
    return [
        jax.core.ShapedArray(x.shape, x.dtype, is_weak)
        for x, is_weak in zip(shapes, weak, strict=False)  # a weight has no result
    ], {_IN_ORDER}


def is_sendable(dtype: Any) -> bool:
    """Return whether the core knows `dtype`: bfloat16, or a numeric type of NumPy itself.

    The floats of ml_dtypes also have kind f, but isbuiltin 2; NumPy has 1 for its own, but 0 after
    pickling.
    """
    if dtype == jnp.bfloat16:
        return True
    return isinstance(dtype, np.dtype) and dtype.isbuiltin != 2 and dtype.kind in "biuf"


_lower_to_callback = mlir.lower_fun(
    lambda *xs, call: _through_callback(call, xs), multiple_results=True
)


Specs = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


class _Traced(NamedTuple):
    """An operation that compiled programs refer to by its number."""

    call: Call
    inputs: Specs
    results: Specs


_traced: list[_Traced] = []
_numbers: dict[_Traced, int] = {}


def _lower_to_xla(ctx: mlir.LoweringRuleContext, *xs: Any, call: Call) -> Any:
    """Lower to a custom call on the program's own memory; the token keeps it in order."""
    avals: tuple[Any, Any] = ctx.avals_in, ctx.avals_out
    shapes = [tuple((x.shape, x.dtype) for x in xs) for xs in avals]
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
    """Execute `Call.run` on XLA's memory; return the error message, or None."""
    try:
        traced = _traced[number]
        ys = _arrays(traced.results, results)
        if traced.call.in_place:  # the first inputs are there already
            traced.call.run(ys + _arrays(traced.inputs[len(ys) :], inputs[len(ys) :]))
        else:
            xs = _arrays(traced.inputs, inputs)
            for y, result in zip(ys, traced.call.run(xs), strict=True):
                if y.shape != result.shape:  # NumPy would repeat a single row
                    raise ValueError(
                        f"{traced.call.title(0)}: the result has shape {list(result.shape)}, but "
                        f"the function was compiled for {list(y.shape)}: compile it again"
                    )
                y[...] = result
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return in_words(error)
    return None


def _arrays(specs: Specs, views: Sequence[memoryview]) -> list[Any]:
    return [np.ndarray(*spec, view) for spec, view in zip(specs, views, strict=True)]


def inside_jit() -> str:
    """Return how operations inside jit are called on a CPU: "xla" or "callback".

    As custom calls of XLA, they work on the program's own memory. If XLA has an unknown interface
    (a RuntimeWarning), or HORO_LITE_INSIDE_JIT says so, they are callbacks, as on GPUs and TPUs:
    inputs and results are then copied through host memory.
    """
    wanted = os.environ.get("HORO_LITE_INSIDE_JIT") or "xla"
    if wanted not in ("xla", "callback"):
        raise ValueError(f"HORO_LITE_INSIDE_JIT must be xla or callback, not {wanted}")
    return "xla" if wanted == "xla" and _xla_calls() else "callback"


@cache
def _xla_calls() -> bool:
    """Register `_run` with XLA under our name; warn, and return False, if that is impossible."""
    jax.devices("cpu")  # before this, registering seems to succeed but has no effect
    try:
        header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
        major, minor = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header)
        handler = _native.xla_handler(_run, (int(major), int(minor)))
        if handler is None:
            raise NotImplementedError(f"version {major}.{minor} is unknown")
        jax.ffi.register_ffi_target(_NAME, handler, platform="cpu")
    except Exception as error:
        warn(
            f"the interface of custom calls in JAX {jax.__version__} cannot be used ({error}): "
            "operations inside jit are callbacks, which are several times slower, and parameters "
            "are not compared. Install a JAX with which this horo_lite was tested, or a newer "
            "horo_lite; HORO_LITE_INSIDE_JIT=callback turns this warning off."
        )
        return False
    return True


def _lower(ctx: mlir.LoweringRuleContext, *xs: Any, call: Call) -> Any:
    _check_devices(ctx, call)
    return _lower_to_callback(ctx, *xs, call=call)


def _lower_on_cpu(ctx: mlir.LoweringRuleContext, *xs: Any, call: Call) -> Any:
    _check_devices(ctx, call)
    return (_lower_to_xla if inside_jit() == "xla" else _lower_to_callback)(ctx, *xs, call=call)


def _check_devices(ctx: mlir.LoweringRuleContext, call: Call) -> None:
    """Raise NotImplementedError if several of this process's devices would make the call.

    They would do so at different times, and be matched with those of other ranks at random.
    """
    context: Any = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    n = getattr(context, "num_devices", 1) if mesh is None else len(mesh.local_devices)
    if n > 1:
        raise NotImplementedError(
            f"{call.title(0)} inside a function over {n} devices of one rank: start a rank for "
            "each device, or call it outside jit on what the function returns"
        )


_NAME = "horo_lite"
(_TOKEN,) = jax.make_jaxpr(jax.lax.create_token)().out_avals
mlir.register_lowering(_primitive, _lower)
mlir.register_lowering(_primitive, _lower_on_cpu, platform="cpu")


def _jvp(xs: Sequence[Array], tangents: Sequence[Array], *, call: Call) -> Any:
    results = _primitive.bind(*xs, call=call)
    for x, traced in zip(results, call.results(xs), strict=True):
        if x.shape != traced.shape:
            raise NotImplementedError(
                f"{call.title(0)} has a gradient only if all ranks have the same number of rows: "
                "pad them"
            )
    # Integers have no tangents, so they are not sent again.
    places = [i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
    moving = [ad.instantiate_zeros(tangents[i]) for i in places]
    if not call.without_gradient:
        moving = _primitive.bind(*moving, call=call.of(places))
    else:  # an error only if the gradient is used: the program may only look at the results
        moving = [_no_tangent.bind(x, call=call) for x in moving]
    moved: list[Any] = [ad.Zero(jax.core.ShapedArray(x.shape, jax.dtypes.float0)) for x in results]
    for i, tangent in zip(places, moving, strict=True):
        moved[i] = tangent
    return results, moved


def _transpose(cotangents: Sequence[Array], *xs: Any, call: Call) -> list[Array]:
    if call.without_gradient:
        _has_no_gradient(call=call)
    given = call.transposed([ad.instantiate_zeros(x) for x in cotangents])
    return [x.reshape(linear.aval.shape) for x, linear in zip(given, xs, strict=True)]


def _has_no_gradient(*_: Any, call: Call) -> NoReturn:
    raise NotImplementedError(f"{call.title(0)} {call.without_gradient} has no gradient")


_no_tangent = Primitive("horo_lite_no_tangent")
_no_tangent.def_impl(_has_no_gradient)
_no_tangent.def_abstract_eval(lambda x, call: x)
ad.deflinear2(_no_tangent, _has_no_gradient)
mlir.register_lowering(_no_tangent, _has_no_gradient)
batching.primitive_batchers[_no_tangent] = lambda xs, axes, call: (
    _no_tangent.bind(*xs, call=call),
    axes[0],
)


def _batch(xs: Sequence[Array], axes: Sequence[int | None], *, call: Call) -> Any:
    if not call.elementwise:
        raise NotImplementedError(
            f"{type(call).__name__.lower()} inside vmap: call it outside, on the whole batch"
        )
    call, xs = call.without_parameters(xs)
    axes = axes[: len(xs)]
    n_results = len(call.results(xs))
    if any(axis is not None for axis in axes[n_results:]):
        raise NotImplementedError(f"{call.title(0)}: inside vmap, all cases must have one weight")
    # To the front on every rank, whatever the axis is there.
    xs = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(xs, axes, strict=True)]
    places = [None if axis is None else 0 for axis in axes[:n_results]]
    return _primitive.bind(*xs, call=call), places


ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
