"""The table of reductions; `checks.check_every_cell_of_the_table` computes its cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launch import run_threads

import horo_lite as hvd
from horo_lite import _native
from horo_lite.collectives import arithmetic
from horo_lite.collectives.reductions import Adasum


@pytest.mark.parametrize("dtype", _native.dtypes())
def test_every_dtype_and_op_is_in_one_row(dtype: str) -> None:
    for op in (*(op.value for op in hvd.Op), Adasum.value):
        rows = [row for row in arithmetic.TABLE if dtype in row.dtypes and op in row.ops]
        assert len(rows) == 1, (dtype, op)
        assert bool(rows[0].result) != bool(rows[0].refusal)


def test_adasum_takes_factors_that_float32_has_room_for() -> None:
    def rank(group: hvd.Group) -> None:
        x = np.full(3, group.rank + 1, np.float32)

        def adasum_(x: Any, *factors: float) -> None:
            before, after = factors or (1.0, 1.0)
            group.exchange(
                [x],
                names=["x"],
                label="x",
                op=Adasum,
                prescale_factor=before,
                postscale_factor=after,
            )

        for factors in ((1e-40, 1.0), (1.0, 1e40), (1e-200, 1.0)):
            with pytest.raises(ValueError, match=r"float32 must be 0 or from 1e-30 to 1e[+]30"):
                adasum_(x, *factors)
        for dtype in (np.int32, np.longdouble):
            with pytest.raises(ValueError, match="is for floating point tensors of at most 64"):
                adasum_(x.astype(dtype))
        adasum_(x, 1e-20, 1e20)
        # a b / 2|a|^2 is 1, a b / 2|b|^2 is 1/4.
        np.testing.assert_allclose(x, np.float32(0.0 + 1.5), rtol=1e-6)

    run_threads(2, rank)
