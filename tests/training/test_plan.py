"""Plans: buckets, digests, and the messages if ranks' plans differ."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo_lite.errors import MismatchError
from horo_lite.training.plan import Entry, Plan, Rows, first_difference, merge


def entry(name: str, *shape: int, dtype: str = "float32", itemsize: int = 4) -> Entry:
    return Entry(name, dtype, shape, itemsize)


def plan(
    *entries: Entry,
    bucket_bytes: int = 100,
    wire: str = "none",
    present: tuple[bool, ...] | None = None,
    owners: tuple[int, ...] | None = None,
    rows: Rows = (),
    **options: str,
) -> Plan:
    return Plan(
        entries,
        present or (True,) * len(entries),
        owners or tuple(range(len(entries))),
        bucket_bytes,
        wire,
        tuple(options.items()),
        rows=rows,
    )


def test_the_last_parameters_leave_first_and_the_last_buckets_are_small() -> None:
    mine = plan(*(entry(f"p{i}", 2) for i in range(60)))  # 8 bytes each
    assert [len(bucket) for bucket in mine.buckets] == [2, 12, 12, 12, 12, 6, 3, 1]
    assert mine.travelling == tuple(reversed(range(60)))


def test_few_gradients_are_one_bucket() -> None:
    assert plan(*(entry(f"p{i}", 1) for i in range(6))).buckets == ((5, 4, 3, 2, 1, 0),)
    assert plan(*(entry(f"p{i}", 1) for i in range(7))).buckets == ((6, 5, 4, 3), (2, 1, 0))


def test_bucket_bytes_are_counted_on_the_wire() -> None:
    entries = [entry(f"p{i}", 10) for i in range(12)]
    assert list(map(len, plan(*entries, wire="fp16").buckets)) == [3, 5, 2, 1, 1]
    integers = [entry(f"p{i}", 10, dtype="int32") for i in range(12)]
    assert list(map(len, plan(*integers, wire="fp16").buckets)) == [1, 2, 2, 2, 2, 1, 1, 1]
    halves = entry("h", 10, dtype="bfloat16", itemsize=2)
    assert plan(halves, wire="fp16").wire_bytes(0) == 20


def test_a_large_gradient_is_a_bucket_of_its_own() -> None:
    mine = plan(entry("a", 5), entry("large", 1000), entry("b", 5), entry("c", 5))
    assert mine.buckets == ((3, 2), (1,), (0,))


def test_missing_and_shared_gradients_do_not_travel() -> None:
    entries = [entry(f"p{i}", 5) for i in range(4)]
    mine = plan(*entries, present=(True, False, True, True), owners=(0, 1, 2, 0))
    assert mine.travelling == (2, 0)
    assert plan(*entries, present=(False,) * 4).buckets == ()
    assert plan().buckets == ()


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    bucket_bytes=st.integers(1, 200),
    data=st.data(),
)
def test_every_present_gradient_travels_once(
    sizes: list[int], bucket_bytes: int, data: st.DataObject
) -> None:
    present = tuple(data.draw(st.booleans()) for _ in sizes)
    entries = [entry(f"p{i}", n) for i, n in enumerate(sizes)]
    mine = plan(*entries, bucket_bytes=bucket_bytes, present=present)
    assert mine.travelling == tuple(i for i in reversed(range(len(sizes))) if present[i])
    total = sum(map(mine.wire_bytes, mine.travelling))
    parts = [8, 4, 2] if total > 2 * bucket_bytes // 8 else []
    largest = [bucket_bytes // part for part in parts]
    largest += [bucket_bytes] * len(mine.buckets)
    n_bytes = [sum(map(mine.wire_bytes, bucket)) for bucket in reversed(mine.buckets)]
    for bucket, size, most in zip(reversed(mine.buckets), n_bytes, largest, strict=False):
        assert len(bucket) == 1 or size <= most
    for next_one, size, most in zip(mine.buckets[-2::-1], n_bytes, largest, strict=False):
        assert size + mine.wire_bytes(next_one[-1]) > most


def test_the_digest_knows_everything_that_must_be_alike() -> None:
    base = plan(entry("a", 2, 3), entry("b", 4))
    others = [
        plan(entry("x", 2, 3), entry("b", 4)),
        plan(entry("a", 3, 2), entry("b", 4)),
        plan(entry("a", 2, 3), entry("b", 4, dtype="int32")),
        plan(entry("b", 4), entry("a", 2, 3)),
        plan(entry("a", 2, 3)),
        plan(entry("a", 2, 3), entry("b", 4), entry("c")),
        plan(entry("a", 2, 3), entry("b", 4), bucket_bytes=101),
        plan(entry("a", 2, 3), entry("b", 4), wire="fp16"),
        plan(entry("a", 2, 3), entry("b", 4), op="Sum"),
        plan(entry("a", 2, 3), entry("b", 4), present=(True, False)),
        plan(entry("a", 2, 3), entry("b", 4), owners=(0, 0)),
    ]
    digests = {base.digest, *(other.digest for other in others)}
    assert len(digests) == len(others) + 1
    assert all(0 <= digest < 2**63 for digest in digests)
    assert plan(entry("a", 2, 3), entry("b", 4)).digest == base.digest


@pytest.mark.launches
def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "from horo_lite.training.plan import Entry, Plan\n"
        "entries = (Entry('a', 'float32', (2, 3), 4),)\n"
        "print(Plan(entries, (True,), (0,), 100, 'none', (('op', 'Average'),)).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {f"{plan(entry('a', 2, 3), op='Average').digest}\n"}


def test_a_gradient_missing_on_some_ranks_is_taken_from_those_that_have_it() -> None:
    absent = Entry("b", "unknown", (), 0)
    mine = plan(entry("a", 2), absent, present=(True, False))
    theirs = plan(Entry("a", "unknown", (), 0), entry("b", 3), present=(False, True))
    assert first_difference([mine, theirs]) is None
    together = merge([mine, theirs])
    assert together == plan(entry("a", 2), entry("b", 3))
    assert together.digest == plan(entry("a", 2), entry("b", 3)).digest
    assert mine.lacks_only_some_of(together)
    assert not together.lacks_only_some_of(mine)


def test_rows_are_those_of_any_rank_with_what_some_rank_knows_of_them() -> None:
    entries = entry("a", 2), Entry("b", "unknown", (), 0), Entry("c", "unknown", (), 0)
    plans = [
        plan(*entries, present=(True, False, False), rows=rows)
        for rows in [((2, ("f4", None)),), ((1, (3,)), (2, ("f4", (5, 6)))), ()]
    ]
    together = merge(plans)
    assert together.rows == ((1, (3,)), (2, ("f4", (5, 6))))
    assert together.travelling == (0,)
    assert together.digest not in {mine.digest for mine in (plans[0], plans[2])}
    assert together == merge([together, *reversed(plans)])
    assert plans[2].lacks_only_some_of(plans[1])
    assert not plans[1].lacks_only_some_of(plans[2])


def test_missing_everywhere_stays_missing() -> None:
    mine = plan(entry("a", 2), Entry("b", "unknown", (), 0), present=(True, False))
    assert merge([mine, mine]).buckets == ((0,),)


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        (
            [plan(entry("conv1.weight", 8, 1, 3, 3)), plan(entry("conv1.weight", 8, 3, 3, 3))],
            "rank 0 has 'conv1.weight' float32[8, 1, 3, 3], "
            "rank 1 has 'conv1.weight' float32[8, 3, 3, 3]",
        ),
        (
            [plan(entry("a", 2), entry("b")), plan(entry("a", 2), entry("c"))],
            "first at parameter 1: rank 0 has 'b' float32[], rank 1 has 'c' float32[]",
        ),
        (
            [plan(entry("a", 2)), plan(entry("a", 2), entry("b", 1)), plan(entry("a", 2))],
            "ranks 0 and 2 have only 1 parameters, rank 1 has 'b' float32[1]",
        ),
        (
            [plan(entry("a", 2)), plan(entry("a", 2, dtype="float16", itemsize=2))],
            "rank 0 has 'a' float32[2], rank 1 has 'a' float16[2]",
        ),
        (
            [plan(entry("a", 2), op="Sum"), plan(entry("a", 2), op="Average")],
            "rank 0 has op=Sum, rank 1 has op=Average",
        ),
        (
            [plan(entry("a", 2), bucket_bytes=7), plan(entry("a", 2))],
            "rank 0 has bucket_bytes=7, rank 1 has bucket_bytes=100",
        ),
        (
            [plan(entry("a", 2), wire="fp16"), plan(entry("a", 2))],
            "rank 0 has compression=fp16, rank 1 has compression=none",
        ),
        (
            [plan(entry("a", 2), entry("b", 2), owners=(0, 0)), plan(entry("a", 2), entry("b", 2))],
            "rank 0 has 'b' float32[2] in the memory of 'a', rank 1 has 'b' float32[2]",
        ),
        (
            [
                plan(entry("a", 2), entry("b", 2), owners=(0, 0)),
                plan(entry("a", 2), entry("b", 2), present=(True, False)),
            ],
            "rank 0 has 'b' float32[2] in the memory of 'a', rank 1 has 'b' without a gradient",
        ),
        (
            [
                plan(entry("a", 2)),
                plan(entry("a", 3)),
                plan(Entry("a", "unknown", (), 0), present=(False,)),
            ],
            "rank 2 has 'a' without a gradient",
        ),
        (
            [
                plan(entry("a", 2), present=(False,), rows=((0, ("f4", shape)),))
                for shape in (None, (5, 6), (7, 6))
            ],
            "'a' belong to different tensors: "
            "rank 0 has f4, rank 1 has f4 [5, 6], rank 2 has f4 [7, 6]. Every rank needs",
        ),
        (
            [
                plan(entry("a", 2), present=(False,), rows=((0, (1,)),)),
                plan(entry("a", 2)),
                plan(entry("a", 2), present=(False,)),
            ],
            "the gradient of 'a' is sparse on rank 0 and dense on others",
        ),
        (
            [plan(entry("a", 2 + (rank == 7))) for rank in range(12)],
            "ranks 0, 1, 2, 3, … 11 (11 of them) have 'a' float32[2], rank 7 has 'a' float32[3]",
        ),
    ],
)
def test_differences_are_told_by_rank(plans: list[Plan], words: str) -> None:
    with pytest.raises(MismatchError) as caught:
        merge(plans)
    assert words in str(caught.value)
    assert str(caught.value) == first_difference(plans)
    assert not all(mine.lacks_only_some_of(plans[-1]) for mine in plans)
