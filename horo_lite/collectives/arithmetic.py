"""Which reductions there are, and what each gives: one table for all operations.

Every blocking, asynchronous, grouped and scattered reduction, and every exchange of gradients, is
looked up here, on all ranks alike: what is not in the table is refused on each of them. An
asynchronous one that is refused is submitted all the same, so that the ranks are compared first and
all raise the error. The wire format is not part of the table. It narrows only floating-point
numbers, and never products: see `Compression`. `tests/support/arithmetic_table.py` runs through all
cells, on one host and on several.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from horo_lite import _native

if TYPE_CHECKING:
    from horo_lite._native import Tensors

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64", "longdouble")
COMPLEX = ("complex32", "complex64", "complex128", "complex256")
COMBINED = ("sum", "product", "min", "max")


class Row(NamedTuple):
    """What reductions of these dtypes by these ops give, or why there are none (`refusal`).

    `factors` are the least and the largest magnitude of prescale_factor and postscale_factor that
    the arithmetic has room for, beside 0 and 1.
    """

    dtypes: Sequence[str]
    ops: Sequence[str]
    result: str
    factors: tuple[float, float] = (1.0, 1.0)
    weights: bool = False
    weights_with_factors: bool = False
    refusal: str = ""


TABLE = (
    Row(["bool"], ["sum", "max"], "whether any is true"),
    Row(["bool"], ["product", "min"], "whether all are true"),
    Row(
        ["bool"],
        ["average"],
        "",
        refusal="the average of bool has no meaning: use Sum (any), Product (all), Min or Max",
    ),
    Row(
        INTEGERS,
        COMBINED,
        "exact, modulo 2 to the power of the bits; a product with a factor is computed in float64 "
        "and truncated towards zero",
        factors=(0.0, 2.0**32),
    ),
    Row(
        INTEGERS,
        ["average"],
        "the exact sum, divided by the number of ranks or by the sum of the weights, and truncated "
        "towards zero; weights are rounded to multiples of 2^-51 of their sum",
        factors=(0.0, 2.0**32),
        weights=True,
    ),
    Row(
        FLOATS,
        COMBINED,
        "in float32, or the dtype if it is wider, rounded to the dtype at the end",
        factors=(1e-150, 1e150),
    ),
    Row(
        FLOATS,
        ["average"],
        "as the sum, divided before it is rounded",
        factors=(1e-150, 1e150),
        weights=True,
        weights_with_factors=True,
    ),
    Row(
        ["float16", "bfloat16", "float32", "float64"],
        ["adasum"],
        "in float32, or float64 if one of the arrays has that dtype",
        factors=(1e-30, 1e30),
    ),
    Row(
        ["bool", *INTEGERS, "longdouble"],
        ["adasum"],
        "",
        refusal="Adasum is for floating point tensors of at most 64 bits",
    ),
    Row(
        COMPLEX,
        ["sum", "average"],
        "the real and the imaginary parts, each as an array of its dtype",
        factors=(1e-150, 1e150),
        weights=True,
        weights_with_factors=True,
    ),
    Row(
        COMPLEX,
        ["product", "min", "max", "adasum"],
        "",
        refusal="complex numbers have only Sum and Average",
    ),
)

_OTHER_TYPES = 1 << 63
"""The bit of `Tensors.dtypes` for types that the core can only move, and for complex numbers."""


def check(
    tensors: Tensors,
    op: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    weighted: bool = False,
    *,
    label: str = "",
    names: Sequence[str] = (),
) -> None:
    """Raise ValueError, naming the first such tensor, if a reduction is not in the table.

    Args:
        tensors: The arrays.
        op: As `Op.value`.
        prescale: The factor of every contribution.
        postscale: The factor of the result.
        weighted: Whether the ranks' contributions have weights.
        label: The operation's name, for the message.
        names: The arrays' names, for the message.
    """
    mask, reasons = _refused(op, prescale, postscale, weighted)
    if not tensors.dtypes & (mask | _OTHER_TYPES):
        return
    for i in range(len(tensors)):
        dtype = tensors.dtype(i)
        if dtype in COMPLEX:
            reason = refusal(dtype, op, prescale, postscale, weighted)
        elif dtype in _native.dtypes():
            reason = reasons.get(dtype, "")
        else:
            reason = "it can be sent, but not reduced: convert it to integers, bool or floats"
        if reason:
            name = repr(names[i]) if i < len(names) else f"{i}"
            where = f"{label}: " if label else ""
            raise ValueError(f"{where}array {name} ({tensors.describe(i)}): {reason}")


@lru_cache(maxsize=256)
def _refused(
    op: str, prescale: float, postscale: float, weighted: bool
) -> tuple[int, dict[str, str]]:
    """Return the dtypes for which this reduction is refused: their bits, and each one's reason."""
    reasons = {
        dtype: reason
        for dtype in _native.dtypes()
        if (reason := refusal(dtype, op, prescale, postscale, weighted))
    }
    mask = sum(1 << bit for bit, dtype in enumerate(_native.dtypes()) if dtype in reasons)
    return mask, reasons


def refusal(
    dtype: str, op: str, prescale: float = 1.0, postscale: float = 1.0, weighted: bool = False
) -> str:
    """Return why a reduction of this dtype is refused; "" if it is not."""
    row = next((row for row in TABLE if dtype in row.dtypes and op in row.ops), None)
    if row is None:
        return f"there is no {op} of {dtype}"
    if row.refusal:
        return row.refusal
    if weighted and not row.weights:
        return f"a weight needs op=Average; with op={op.capitalize()} it has no meaning"
    least, largest = row.factors
    for name, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if factor == 1.0:
            continue
        if weighted and not row.weights_with_factors:
            return (
                f"an average of {dtype} that is weighted by samples takes no {name}: multiply the "
                "result, or convert the array to float64"
            )
        if largest == 1.0:
            return (
                f"{dtype} takes no {name} (it is {factor}): leave it out, or convert the array to "
                "integers or floating-point numbers"
            )
        if factor != 0.0 and not least <= abs(factor) <= largest:
            limit = f"at most {largest:g}" if not least else f"from {least:g} to {largest:g}"
            return f"{name} of {dtype} must be 0 or {limit} in magnitude, not {factor}"
    return ""
