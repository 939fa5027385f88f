"""The flags of horovodrun: which are supported here, ignored or refused."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

_WITHOUT_VALUE = (
    *("--gloo", "--mpi", "--jsrun", "--tcp", "--disable-cache", "--stall-check"),
    *("--autotune", "--no-autotune", "--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    *("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
    *("--hierarchical-allgather", "--no-hierarchical-allgather"),
    *("--mpi-threads-disable", "--no-mpi-threads-disable"),
    *("--log-with-timestamp", "--log-hide-timestamp", "--prefix-output-with-timestamp"),
)
_WITH_VALUE = (
    *("--network-interfaces", "--network-interface", "-p", "--ssh-port"),
    *("-i", "--ssh-identity-file", "--cycle-time-ms", "--cache-capacity", "--log-level"),
    *("--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds", "--binding-args"),
    *("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample"),
    *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
    "--slots-per-host",
)
_REFUSED = {
    "--config-file": "not supported: use flags instead, see --help",
    **dict.fromkeys(
        (
            *("--min-np", "--max-np", "--min-num-proc", "--max-num-proc", "--slots"),
            *("--host-discovery-script", "--reset-limit", "--cooldown-range", "--elastic-timeout"),
        ),
        "no driver adds hosts here: use --elastic or --restarts, and see docs/elastic.md",
    ),
}


class _Left(argparse.Action):
    """Records a flag that has no effect here, to be reported once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        if option_string in _REFUSED:
            parser.error(f"{option_string}: {_REFUSED[option_string]}")
        namespace.meaningless = [*namespace.meaningless, option_string]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add horovodrun's flags to the parser; `variables` reads their values."""
    group = parser.add_argument_group(
        "flags of horovodrun", "its other flags are accepted, but have no effect here"
    )
    add = group.add_argument
    add("--output-filename", metavar="FOLDER", help="copy rank 3's output to rank.3/stdout, etc.")
    add("--start-timeout", type=float, metavar="S", help="for ranks to find each other without MPI")
    add("--fusion-threshold-mb", type=float, metavar="MB", help="HORO_LITE_BUCKET_BYTES")
    add("--no-stall-check", action="store_true", help="HORO_LITE_STALL_WARN_S=0")
    add("--stall-check-warning-time-seconds", type=float, metavar="S", dest="stall_warn_s")
    add("--stall-check-shutdown-time-seconds", type=float, metavar="S", dest="stall_abort_s")
    add("--verbose", action="store_true", help="show the command that starts the ranks")
    parser.set_defaults(meaningless=[])
    for flag in _WITHOUT_VALUE:
        add(flag, action=_Left, nargs=0, dest="meaningless", help=argparse.SUPPRESS)
    for flag in (*_WITH_VALUE, *_REFUSED):
        add(flag, action=_Left, dest="meaningless", help=argparse.SUPPRESS)


def variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that the flags stand for."""
    if args.meaningless:
        print(f"horo_lite: ignored flags: {' '.join(args.meaningless)}", file=sys.stderr)
    values = {
        "HORO_LITE_START_TIMEOUT_S": args.start_timeout,
        "HORO_LITE_STALL_WARN_S": 0 if args.no_stall_check else args.stall_warn_s,
        "HORO_LITE_STALL_ABORT_S": args.stall_abort_s,
    }
    if args.fusion_threshold_mb is not None:  # 0, no fusion, is the smallest bucket
        values["HORO_LITE_BUCKET_BYTES"] = max(1, round(args.fusion_threshold_mb * 2**20))
    return {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
        if value is not None
    }


def show(command: Sequence[str]) -> None:
    """Print the command, as `--verbose` requests."""
    print(f"horo_lite: {shlex.join(command)}", file=sys.stderr, flush=True)
