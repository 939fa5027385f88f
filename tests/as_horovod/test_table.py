"""The tables of docs/from-horovod.md: names exist, and "same" ones also have the same positions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-horovod.md").read_text()
HOMES = {
    "horovod.torch": ["horovod.torch"],
    "horovod.torch.elastic": ["horovod.torch.elastic"],
    "horovod.tensorflow": ["horovod.tensorflow"],
    "horovod.tensorflow.elastic": ["horovod.tensorflow.elastic"],
    "horovod.keras": ["horovod.keras", "horovod.tensorflow.keras"],
    "horovod.keras.callbacks": ["horovod.keras.callbacks", "horovod.tensorflow.keras.callbacks"],
    "horovod.keras.elastic": ["horovod.keras.elastic", "horovod.tensorflow.keras.elastic"],
    "horovod.runner": ["horovod.runner"],
    "horovod.data": ["horovod.data", "horovod.data.data_loader_base"],
    "horovod.ray": ["horovod.ray", "horovod.ray.runner"],
    "horovod.spark": ["horovod.spark", "horovod.spark.runner"],
}
COMMON = ("exceptions", "process_sets", "util")

# Horovod 0.28's parameters, since scripts pass them by position and by name.
SCALED = "prescale_factor postscale_factor"
TORCH = f"tensor average name op {SCALED} process_set"
MANY = f"tensors average name op {SCALED} process_set"
KERAS = (
    "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op backward_passes_per_step average_aggregated_gradients num_groups "
    "groups process_set"
)
TAPE = (
    "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor "
    "num_groups groups process_set"
)
DENSE = "average device_dense device_sparse compression op"
POSITIONS = {
    "horovod.torch": {
        "init": "comm process_sets",
        "allreduce": f"tensor average name compression op {SCALED} process_set",
        "allreduce_async": TORCH,
        "allreduce_": TORCH,
        "allreduce_async_": TORCH,
        "grouped_allreduce": f"tensors average name compression op {SCALED} process_set",
        "grouped_allreduce_async": MANY,
        "grouped_allreduce_": MANY,
        "grouped_allreduce_async_": MANY,
        "sparse_allreduce_async": "tensor name op process_set",
        "allgather": "tensor name process_set",
        "allgather_async": "tensor name process_set",
        "grouped_allgather": "tensors name process_set",
        "broadcast": "tensor root_rank name process_set",
        "broadcast_": "tensor root_rank name process_set",
        "broadcast_async": "tensor root_rank name process_set",
        "broadcast_async_": "tensor root_rank name process_set",
        "alltoall": "tensor splits name process_set",
        "alltoall_async": "tensor splits name process_set",
        "reducescatter": f"tensor name compression op process_set {SCALED}",
        "reducescatter_async": f"tensor name op process_set {SCALED}",
        "barrier": "process_set",
        "join": "device",
        "broadcast_parameters": "params root_rank",
        "broadcast_optimizer_state": "optimizer root_rank model",
        "broadcast_object": "obj root_rank name process_set",
        "allgather_object": "obj name",
        "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step "
        "op gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    },
    "horovod.tensorflow": {
        "init": "comm process_sets",
        "allreduce": f"tensor {DENSE} {SCALED} name process_set ignore_name_scope",
        "grouped_allreduce": f"tensors {DENSE} {SCALED} process_set ignore_name_scope name",
        "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope "
        f"{SCALED}",
        "allgather": "tensor name ignore_name_scope process_set",
        "grouped_allgather": "tensors name ignore_name_scope process_set",
        "broadcast": "tensor root_rank name ignore_name_scope process_set",
        "broadcast_": "variables root_rank name process_set",
        "broadcast_variables": "variables root_rank process_set inplace",
        "alltoall": "tensor splits name ignore_name_scope process_set",
        "broadcast_object": "obj root_rank session name process_set",
        "broadcast_object_fn": "root_rank session name process_set",
        "allgather_object": "obj session name process_set",
        "size_op": "process_set_id name",
        "DistributedOptimizer": "optimizer name use_locking device_dense device_sparse compression "
        "sparse_as_dense backward_passes_per_step op gradient_predivide_factor "
        "average_aggregated_gradients num_groups groups process_set scale_local_gradients",
        "DistributedGradientTape": f"{TAPE} scale_local_gradients",
        "PartialDistributedGradientTape": f"{TAPE} local_layers scale_local_gradients",
    },
    "horovod.keras": {
        "DistributedOptimizer": f"{KERAS} scale_local_gradients",
        "PartialDistributedOptimizer": f"{KERAS} local_layers scale_local_gradients",
        "allreduce": f"value name average {SCALED} op compression",
        "allgather": "value name",
        "broadcast": "value root_rank name",
        "reducescatter": "value name op",
        "load_model": "filepath custom_optimizers custom_objects compression legacy_opts",
    },
    "horovod.keras.callbacks": {
        "BroadcastGlobalVariablesCallback": "root_rank device local_variables",
        "MetricAverageCallback": "device",
        "LearningRateScheduleCallback": "initial_lr multiplier start_epoch end_epoch staircase "
        "momentum_correction steps_per_epoch",
        "LearningRateWarmupCallback": "initial_lr warmup_epochs momentum_correction "
        "steps_per_epoch verbose",
    },
    "horovod.keras.elastic": {
        "KerasState": "model optimizer backend",
        "CommitStateCallback": "state batches_per_commit",
        "UpdateBatchStateCallback": "state",
        "UpdateEpochStateCallback": "state",
    },
    "horovod.tensorflow.elastic": {"TensorFlowState": "variables session"},
    "horovod.torch.elastic": {"TorchState": "model optimizer", "ElasticSampler": "dataset"},
    "horovod.runner": {
        "run": "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit "
        "cooldown_range hosts hostfile start_timeout ssh_port ssh_identity_file disable_cache "
        "output_filename verbose use_gloo use_mpi mpi_args network_interface executable np min_np "
        "max_np"
    },
    "horovod.data": {"AsyncDataLoaderMixin": "async_loader_queue_size"},
    "horovod.ray": {
        "RayExecutor": "settings num_workers num_hosts num_workers_per_host cpus_per_worker "
        "use_gpu gpus_per_worker use_current_placement_group min_workers max_workers reset_limit "
        "cooldown_range elastic_timeout override_discovery",
    },
    "horovod.spark": {
        "run": "fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout "
        "stderr verbose nics prefix_output_with_timestamp",
    },
}

# All names without an underscore in Horovod 0.28's modules, including imported ones.
BASICS = """
init shutdown is_initialized start_timeline stop_timeline rank size local_rank local_size cross_rank
cross_size is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built
nccl_built ddl_built ccl_built cuda_built rocm_built ProcessSet global_process_set add_process_set
remove_process_set Average Sum Adasum Min Max Product Compression
"""
NAMES = {
    "horovod.torch": f"""
        {BASICS} allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce
        grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async
        allgather allgather_async grouped_allgather grouped_allgather_async broadcast
        broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter
        reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll
        synchronize allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
        DistributedOptimizer SyncBatchNorm elastic check_extension check_installed_version
    """,
    "horovod.tensorflow": f"""
        {BASICS} allreduce grouped_allreduce allgather grouped_allgather broadcast broadcast_
        alltoall reducescatter grouped_reducescatter join rank_op local_rank_op size_op
        local_size_op process_set_included_op allgather_object broadcast_object broadcast_object_fn
        broadcast_variables broadcast_global_variables BroadcastGlobalVariablesHook
        DistributedOptimizer DistributedGradientTape PartialDistributedGradientTape
        SyncBatchNormalization elastic check_extension gpu_available split_list
        handle_average_backwards_compatibility check_num_rank_power_of_2 vars_to_refs refs_to_vars
        LocalGradientAggregationHelper support_non_legacy_keras_optimizers
    """,
    "horovod.keras": f"""
        {BASICS} DistributedOptimizer PartialDistributedOptimizer broadcast_global_variables
        allreduce allgather broadcast reducescatter load_model callbacks elastic
    """,
    "horovod.keras.callbacks": """
        BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback
        LearningRateWarmupCallback BestModelCheckpoint
    """,
    "horovod.runner": "run run_commandline",
}


def rows() -> dict[str, dict[str, str]]:
    """Return for each table, by its heading: the names, and same, different or absent."""
    found: dict[str, dict[str, str]] = {}
    for section in PAGE.split("\n### ")[1:]:
        heading, _, text = section.partition("\n")
        names = found.setdefault(heading.strip(), {})
        for cells in re.findall(r"^\| (`.*`) \| (\w+) \| (.*?) ?\|$", text, re.MULTILINE):
            for name in re.findall(r"`(\w+)`", cells[0]):
                assert name not in names, (heading, name)
                assert cells[2] or cells[1] == "same", (heading, name)
                names[name] = cells[1]
    return found


LOOK = """
import inspect, json, sys
from importlib import import_module
sys.path.insert(0, {docs!r})
from extension import stubs
stubs.install()
import horo_lite.horovod
horo_lite.horovod.install(replace=True)
looks = {{}}
for module, names in json.loads(sys.argv[1]).items():
    home = import_module(module)
    looks[module] = {{}}
    for name in names:
        if not hasattr(home, name):
            continue
        value = getattr(home, name)
        try:
            parameters = list(inspect.signature(value).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        looks[module][name] = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
print(json.dumps(looks))
"""


@pytest.fixture(scope="module")
def looks() -> dict[str, dict[str, list[str]]]:
    """Return each module's names and positional parameters, with stubs for frameworks."""
    known = rows()
    modules = {module: list(known[table]) for table in HOMES for module in HOMES[table]}
    modules |= {f"horovod.common.{part}": list(known["horovod.common"]) for part in COMMON}
    code = LOOK.format(docs=str(ROOT / "docs"))
    found = subprocess.run(
        [sys.executable, "-c", code, json.dumps(modules)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    result: dict[str, dict[str, list[str]]] = json.loads(found.stdout)
    return result


def test_every_table_is_looked_at() -> None:
    assert set(rows()) == {*HOMES, "horovod.common"}
    assert sum(map(len, rows().values())) > 150


@pytest.mark.parametrize("table", NAMES)
def test_no_name_of_horovods_is_missing(table: str) -> None:
    assert set(NAMES[table].split()) - set(rows()[table]) == set()


@pytest.mark.launches
@pytest.mark.parametrize("table", [*HOMES, "horovod.common"])
def test_names_are_where_the_tables_say(table: str, looks: dict[str, dict[str, list[str]]]) -> None:
    groups = [[f"horovod.common.{part}" for part in COMMON]]
    if table in HOMES:
        groups = [[module] for module in HOMES[table]]
    for modules in groups:
        names = {name for module in modules for name in looks[module]}
        for name, kind in rows()[table].items():
            assert kind in ("same", "different", "absent")
            assert (name in names) == (kind != "absent"), (modules, name)


@pytest.mark.launches
@pytest.mark.parametrize("table", POSITIONS)
def test_arguments_have_horovods_positions(
    table: str, looks: dict[str, dict[str, list[str]]]
) -> None:
    for module in HOMES[table]:
        for name, given in POSITIONS[table].items():
            assert name in rows()[table]
            expected = given.split()
            assert looks[module][name][: len(expected)] == expected, (module, name)
