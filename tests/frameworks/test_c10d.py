"""PyTorch alone on the backend "horo_lite": its own tests of backends, and a script for DDP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import PATIENCE
from torchrun import assert_same_bits, results, run_torchrun
from without_mpi import started

LIMIT_S = 120
pytestmark = pytest.mark.timeout(4 * PATIENCE * LIMIT_S)

# Those that cannot pass on two ranks without a GPU. The first four reasons hold for gloo as well.
NOT_APPLICABLE = {
    "needs GPUs": {
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_all_to_all_cuda",
        "test_all_to_all_cuda_complex",
        "test_all_to_all_full_group_cuda",
        "test_batch_isend_irecv_op_err",
    },
    "needs a PyTorch with NCCL": {"test_batch_isend_irecv_mixed_backend_err"},
    "needs torchvision": {"test_SyncBatchNorm_process_group"},
    "needs at least three ranks": {"test_new_subgroups_with_group_param"},
    "PyTorch allows monitored_barrier on gloo alone": {
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
    },
    "expects gloo's text when a barrier fails; ours names the rank that is missing": {
        "test_barrier_timeout_full_group",
        "test_barrier_timeout_global",
    },
}
N_PASSED = 94  # of 285; PyTorch skips the others, most of them for want of GPUs or ranks


@pytest.mark.shows("eager", "overlap")
def test_what_gloo_passes(tmp_path: Path) -> None:
    (folder := tmp_path / "outcomes").mkdir()
    script, args = Path(__file__).with_name("c10d_ranks.py"), ["horo_lite", str(folder)]
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    with started(script, 2, tmp_path, env=env, args=args) as job:
        job.wait(LIMIT_S).check()
    ranks = [json.loads((folder / f"outcomes of {rank}.json").read_text()) for rank in range(2)]
    outcomes = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    failed = {
        name: texts
        for name, texts in outcomes.items()
        if not all(text.startswith(("passed", "skipped")) for text in texts)
    }
    listed = set().union(*NOT_APPLICABLE.values())
    unexpected = [f"{name}:\n" + "\n".join(failed[name]) for name in sorted(failed.keys() - listed)]
    assert not unexpected, "\n\n".join(unexpected)
    assert not listed - failed.keys(), "these pass now, or are gone: they are listed in vain"
    assert sum(texts == ["passed"] * 2 for texts in outcomes.values()) == N_PASSED


@pytest.mark.shows("eager", "overlap")
def test_a_script_for_ddp_trains_as_on_gloo(tmp_path: Path) -> None:
    """Bit for bit; each run has also compared itself with one process on the whole batches."""
    ranks, script = [], Path(__file__).with_name("wrappers_ranks.py")
    for backend in ("gloo", "horo_lite"):
        run_torchrun(script, "ddp", backend, tmp_path / backend, folder=tmp_path)
        ranks += results(tmp_path / backend)
    assert_same_bits(ranks)
