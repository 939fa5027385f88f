"""Messages of 8 and 4 bits between hosts: how far off, how many bytes, and what is left over."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import oracle
import pytest
from test_hosts_allreduce import Arithmetic, World

from horo_lite import _native

pytestmark = pytest.mark.timeout(60)

BLOCK = 256  # elements that share one scale
LEVELS = {"int8": 127, "int4": 7}
BLOCK_BYTES = {"none": 4 * BLOCK, "int8": 4 + BLOCK, "int4": 4 + BLOCK // 2}
WIRES = ("int8", "int4")


def largest(x: np.ndarray) -> np.ndarray:
    """Return, for each element, the largest magnitude in its block."""
    starts = range(0, x.size, BLOCK)
    most = np.maximum.reduceat(np.abs(x), starts).repeat(BLOCK)
    return most[: x.size].astype(np.float64)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 1, 1), (2, 2)], ids=str)
def test_the_error_is_at_most_half_a_step_for_each_rounding(
    sizes: tuple[int, ...], wire: str
) -> None:
    """Of each host's sum, in messages that have no more bytes than they should."""
    world = World(sizes)
    rng = np.random.default_rng(3)
    # Neighbouring blocks have very different sizes; the last ones are not full.
    cuts = [0, 1, 1, 700, 300_000, 1_100_003]
    scales = np.float32(10.0) ** rng.integers(-9, 9, cuts[-1] // 64 + 1).repeat(64)[: cuts[-1]]
    inputs = [
        (rng.standard_normal(cuts[-1]) * scales * (r + 1)).astype(np.float32)
        for r in range(world.size)
    ]
    how = Arithmetic("average", wire, divisor=float(world.size))
    parts = [[x[a:b] for a, b in itertools.pairwise(cuts)] for x in inputs]
    results = world.run(parts, how)
    for got, *given in zip(results[0], *parts, strict=True):
        if got.size:
            hosts = [sum(given[r].astype(np.float64) for r in host) for host in world.hosts]
            error = np.abs(got - sum(hosts) / world.size)
            # A host's sum is rounded as one contribution of all its ranks.
            allowed = sum(map(largest, hosts)) / world.size + largest(got)
            assert (error <= allowed / (2 * LEVELS[wire]) * 1.0001 + 1e-30).all()
            assert got.size < BLOCK or error.max() > 0
    for got in results[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(got, results[0], strict=True))
    assert world.network.n_waiting() == 0


def test_all_instruction_sets_have_the_same_bits_in_as_few_bytes_as_promised() -> None:
    best = _native.instruction_set()
    rng = np.random.default_rng(5)
    n = 3000 * BLOCK
    inputs = [[rng.standard_normal(n).astype(np.float32)] for _ in range(2)]
    try:
        for wire, block_bytes in BLOCK_BYTES.items():
            seen = set()
            for isa in dict.fromkeys(["portable", "avx2", best]):
                try:
                    _native.use_instruction_set(isa)
                except ValueError:  # not in this build
                    continue
                world = World((1, 1))
                residuals = [[np.full(n, 0.001 * r, np.float32)] for r in range(2)]
                got = world.run(inputs, Arithmetic("sum", wire), residuals=residuals)
                seen.add(b"".join(x.tobytes() for (x,) in (*got, *residuals)))
                # Half of the numbers to their owner, and the other half of the results back.
                assert set(world.network.n_bytes.values()) == {n // BLOCK * block_bytes}
            assert len(seen) == 1
    finally:
        _native.use_instruction_set(best)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
def test_what_was_received_and_what_is_left_over_is_what_was_given(
    sizes: tuple[int, ...], wire: str
) -> None:
    """Over any steps: with other fusion, weights and factors in each, and zeros at times."""
    world = World(sizes)
    rng = np.random.default_rng(9)
    lengths = [700, 3, 50_000, 1_025]
    n = world.size

    def each(make: Callable[[int], np.ndarray]) -> list[list[np.ndarray]]:
        return [[make(length) for length in lengths] for _ in range(n)]

    residuals = each(lambda length: np.zeros(length, np.float32))
    received = [np.zeros(length) for length in lengths]
    exact = [np.zeros(length) for length in lengths]
    without = [np.zeros(length) for length in lengths]
    # A direction that is always the same, and too small for its block: only the residual sends it.
    small = each(lambda length: (np.arange(length) % 97 == 5).astype(np.float32) * 1e-3)
    for step in range(12):
        given = each(lambda length: rng.standard_normal(length).astype(np.float32))
        for rank, i in itertools.product(range(n), range(len(lengths))):
            given[rank][i] += small[rank][i]
            given[rank][i] *= 0 if step == 7 else 1 + rank
        how = [
            Arithmetic("average", wire, divisor=float(n)),
            Arithmetic("sum", wire, prescale=0.5, scale=3.0),
            Arithmetic("sum", wire, weights=[0.1 + 0.2 * r for r in range(n)], divisor=0.7),
        ][step % 3]
        weights = how.weights or [1.0] * n
        for group in [[0, 1, 2, 3]] if step % 2 else [[2, 0], [3, 1]]:
            parts = [[given[rank][i] for i in group] for rank in range(n)]
            kept = [[residuals[rank][i] for i in group] for rank in range(n)]
            got = world.run(parts, how, residuals=kept)
            forgetful = world.run(parts, how)
            for k, i in enumerate(group):
                assert len({got[rank][k].tobytes() for rank in range(n)}) == 1
                received[i] += got[0][k]
                without[i] += forgetful[0][k]
                exact[i] += (
                    sum(w * given[r][i].astype(np.float64) for r, w in enumerate(weights))
                    * (how.prescale * how.scale / how.divisor)
                )  # fmt: skip
    for i in range(len(lengths)):
        left = sum(residuals[rank][i].astype(np.float64) for rank in range(n))
        np.testing.assert_allclose(received[i] + left, exact[i], atol=5e-5)
        # So the error of a sum does not grow with the steps, as it does without.
        if lengths[i] > 100:
            assert np.abs(left).max() > 20 * 5e-5
            error, grown = (np.abs(x[i] - exact[i]).mean() for x in (received, without))
            assert error < 0.8 * grown


@pytest.mark.parametrize("wire", WIRES)
def test_blocks_that_are_not_finite_arrive_as_nan_and_change_nothing_else(wire: str) -> None:
    world = World((1, 1))
    rng = np.random.default_rng(11)
    inputs = [[rng.standard_normal(3000).astype(np.float32)] for _ in range(2)]
    inputs[1][0][300], inputs[0][0][2999] = np.inf, np.nan
    residuals = [[np.full(3000, 0.01 * (1 + r), np.float32)] for r in range(2)]
    (got,), (other,) = world.run(inputs, Arithmetic("sum", wire), residuals=residuals)
    assert got.tobytes() == other.tobytes()
    bad = np.zeros(3000, bool)
    bad[256:512] = bad[2816:] = True  # in blocks of 256, from each share's beginning
    np.testing.assert_array_equal(np.isnan(got), bad)
    for r in range(2):
        assert np.isfinite(residuals[r][0]).all()
    # What neither rank could send is not forgotten.
    kept = [(residuals[r][0][bad] == np.float32(0.01 * (1 + r))).all() for r in range(2)]
    assert any(kept)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_other_floats_are_quantized_too(dtype: str, wire: str) -> None:
    world = World((2, 1))
    inputs = [[oracle.sample(r, (5000,), dtype)] for r in range(3)]
    got = world.run(inputs, Arithmetic("average", wire, divisor=3.0))
    wide = [x.astype(np.float64) for (x,) in inputs]
    error = np.abs(got[0][0].astype(np.float64) - sum(wide) / 3)
    hosts = [wide[host[0]] + (wide[host[1]] if len(host) == 2 else 0) for host in world.hosts]
    allowed = (sum(map(largest, hosts)) / 3 + largest(sum(wide) / 3)) / (2 * LEVELS[wire])
    assert (error <= 1.1 * allowed + 0.01 * np.abs(sum(wide))).all()
    assert error.max() > 1e-3
    assert {x.tobytes() for (x,) in got} == {got[0][0].tobytes()}


@pytest.mark.parametrize("wire", WIRES)
def test_whole_numbers_and_other_operations_travel_as_they_are(wire: str) -> None:
    """Also beside tensors that are quantized."""
    world = World((1, 2))
    rng = np.random.default_rng(13)
    floats = [rng.standard_normal(5000).astype(np.float32) for _ in range(3)]
    whole = [rng.integers(-(2**40), 2**40, 5001) for _ in range(3)]
    parts = [[x[:7], w, x[7:]] for x, w in zip(floats, whole, strict=True)]
    for got in world.run(parts, Arithmetic("sum", wire)):
        np.testing.assert_array_equal(got[1], sum(whole))
        assert np.abs(got[2] - sum(floats)[7:]).max() > 1e-3
    for got in world.run(parts, Arithmetic("min", wire)):
        np.testing.assert_array_equal(got[2], np.min(floats, axis=0)[7:])


@pytest.mark.parametrize("wire", WIRES)
def test_numbers_at_the_ends_of_float32s_range(wire: str) -> None:
    world = World((1, 1))
    for size in (3e38, 1e-30, 1e-38, 0.0):
        x = np.linspace(-size, size, 777, dtype=np.float32)
        residuals = [[np.zeros(777, np.float32)] for _ in range(2)]
        how = Arithmetic("average", wire, prescale=0.5, divisor=1.0)
        got = world.run([[x], [x]], how, residuals=residuals)[0][0]
        left = residuals[0][0].astype(np.float64) + residuals[1][0]
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got + left, x.astype(np.float64), atol=1e-6 * size + 1e-44)


def test_residuals_must_fit() -> None:
    tensors = _native.Tensors([np.zeros(5, np.float16)])
    for wrong in (np.zeros(4, np.float32), np.zeros(5, np.float16)):
        with pytest.raises(ValueError, match="residual 0 has another size, or is not float32"):
            tensors.keep_residuals(_native.Tensors([wrong]))
    with pytest.raises(ValueError, match="one for each tensor"):
        tensors.keep_residuals(_native.Tensors([]))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
def test_what_travels_together_changes_no_bit(sizes: tuple[int, ...], wire: str) -> None:
    """As long as a step's operations depend on timing, nothing else would be reproducible."""
    lengths = [700, 3, 50_000, 1_025, 600_000, 2_048]

    def steps(groups: list[list[list[int]]]) -> list[bytes]:
        world = World(sizes)
        rng = np.random.default_rng(21)
        residuals = [[np.zeros(n, np.float32) for n in lengths] for _ in range(world.size)]
        how = Arithmetic("average", wire, divisor=float(world.size))
        found = []
        for of_step in groups:
            given = [
                [rng.standard_normal(n).astype(np.float32) for n in lengths]
                for _ in range(world.size)
            ]
            results = [b""] * len(lengths)
            for group in of_step:
                kept = [[one[i] for i in group] for one in residuals]
                got = world.run([[one[i] for i in group] for one in given], how, residuals=kept)
                for i, x in zip(group, got[0], strict=True):
                    results[i] = x.tobytes()
            found.append(b"".join(results))
        return found

    together = [[0, 1, 2, 3, 4, 5]]
    apart = [[5], [4, 0], [1, 2, 3]]
    assert steps([together] * 3) == steps([apart, together, [[3, 2], [0, 1, 4, 5]]])


def test_hosts_send_equally_much() -> None:
    """Also of many tensors of a block or less."""
    for lengths in ([200 + i for i in range(600)], [900_001]):
        for n in 2, 3:
            world = World((1,) * n)
            world.run([[np.ones(k, np.float32) for k in lengths]] * n, Arithmetic("sum", "int8"))
            sent = [sum(world.network.n_bytes[a, b] for b in range(n)) for a in range(n)]
            assert max(sent) < 1.15 * min(sent)
