"""`horo-lite -n 4 train.py`: run a script on several ranks, with any MPI.

`python -m horo_lite` is the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from horo_lite import __version__
from horo_lite.errors import CheckpointError, LauncherError, ranks_in_words
from horo_lite.horovod import aliases
from horo_lite.launch import bench, compare, doctor, horovodrun, hostfile, jobs, output, top
from horo_lite.recording import flight_record, records, timeline
from horo_lite.start import launcher

_TIMELINE = "HORO_LITE_TIMELINE"
_STEPS = "HORO_LITE_RECORD_STEPS"
_NOISE = "HORO_LITE_NOISE_EVERY"
_EXAMPLES = """\
examples:
  %(prog)s -n 4 train.py --epochs 10
  %(prog)s -H node1:4,node2:4 train.py
  %(prog)s -n 4 --restarts 3 --checkpoint run.ckpt train.py
  %(prog)s -n 4 --mpiexec-args="--bind-to none" -m package.train
  %(prog)s -n 4 --as-horovod train.py       (an unchanged script for Horovod)
  %(prog)s doctor
  %(prog)s bench -n 4 --compare             (speed of collective operations here)

Without restarts, mpiexec replaces this process: its exit code and signals are those of mpiexec.
"""


def _prog() -> str:
    name = os.path.basename(sys.argv[0])
    return name if name in ("horo-lite", "horo_lite") else "python -m horo_lite"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_prog(),
        usage="%(prog)s [run] -n N [options] {script.py | -m module | command} [arguments]\n"
        "       %(prog)s doctor [--json]\n"
        "       %(prog)s bench [-n N] [--op OP] [options]\n"
        "       %(prog)s top [FOLDER] [--interval S] [--once]\n"
        "       %(prog)s compare FILE FILE [--tolerance T]\n"
        "       %(prog)s flight-record FOLDER | trace FILE",
        description="Run a program on several ranks (`run` may be omitted), check what is\n"
        "installed with `doctor`, time collective operations with `bench`, watch a job with\n"
        "`top`, `compare` the steps of two runs, or write the last operations of the ranks of a\n"
        "job that hangs or was killed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        *("-n", "-np", "--num-proc"),
        type=int,
        dest="n",
        metavar="N",
        help="number of ranks; by default the sum over --hosts or --hostfile",
    )
    add("-H", "--hosts", metavar="A:4,B:4", help="hosts, each with its number of ranks")
    add(
        *("--hostfile", "-hostfile"),
        metavar="FILE",
        help="file with hosts, in lines such as `node1 slots=4`",
    )
    add(
        "--timeline-filename",
        metavar="FILE",
        help="write a trace of the ranks' operations; with {rank} in the name, one per rank",
    )
    add(
        "--record-steps",
        metavar="FILE",
        help="write what every step begins with, for `compare`",
    )
    add(
        "--noise-every",
        type=int,
        metavar="N",
        help="measure the gradients' noise in every N-th step, and say at the end whether more "
        "ranks would pay",
    )
    add(
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="start a failed job again, up to K times, from its last commit (horo_lite.elastic)",
    )
    add(
        "--checkpoint",
        metavar="FILE",
        help="file for commits, also read at the start; by default, with --restarts, a temporary "
        "file",
    )
    add(
        "--elastic",
        action="store_true",
        help="continue when a rank dies (Open MPI 5; see horo_lite.elastic)",
    )
    add(
        *("--mpiexec-args", "--mpi-args"),
        default="",
        metavar="'…'",
        help="more arguments for mpiexec",
    )
    add(
        "--as-horovod",
        action="store_true",
        help="make `import horovod` find horo_lite in the job, if no real Horovod is installed",
    )
    add(
        "--as-horovod-anyway",
        action="store_true",
        help="the same, even if a real Horovod is installed",
    )
    add("--check", action="store_true", help="the same as `doctor`")
    add("-cb", "--check-build", action="store_true", help="list frameworks and transports")
    add("--version", action="version", version=f"horo_lite {__version__}")
    horovodrun.add_to(parser)
    add("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    add("program", nargs=argparse.REMAINDER, help="script.py or any command, with its arguments")
    return parser


def _doctor(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{_prog()} doctor",
        description="Check what is installed, say how to fix problems, and run a first job.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="output for programs and bug reports")
    return doctor.main(as_json=parser.parse_args(arguments).json)


def _bench(arguments: Sequence[str]) -> int:
    options = bench.parser(f"{_prog()} bench").parse_args(arguments)
    if launcher.detect(os.environ) is not None:  # this process is already a rank
        bench.work(arguments)
        return 0
    hosts = ["--hosts", options.hosts] if options.hosts else []
    return main(["-n", str(options.n), *hosts, "-m", bench.__name__, *arguments])


def _compare(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{_prog()} compare",
        description="Compare the steps of two runs, such as one on 1 rank and one on 4, and name "
        "the first that differs: in the gradients, or in what the optimizer does with them. Each "
        "run was started with --record-steps FILE, or with HORO_LITE_RECORD_STEPS=FILE.",
        epilog="exit code: 0 if the steps are the same, 1 if not, 2 if a file cannot be used",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("first", type=Path, metavar="FILE", help="the run to compare with")
    add("second", type=Path, metavar="FILE", help="the run in question")
    add(
        "--tolerance",
        type=float,
        default=compare.TOLERANCE,
        metavar="T",
        help="relative difference that does not count (default: %(default)s, and more for 16 bits)",
    )
    args = parser.parse_args(arguments)
    if not 0 < args.tolerance < 1:
        parser.error("--tolerance must be more than 0 and less than 1")
    return compare.main(args.first, args.second, args.tolerance)


def _flight_record(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{_prog()} flight-record",
        description="Write the last operations of every rank of a job, which may still be running, "
        "in the format of PyTorch's flight recorder: `torchfrtrace FOLDER` compares them. A job "
        "that fails does so itself, unless its launcher kills all ranks at once.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="the job's HORO_LITE_FLIGHT_RECORD")
    folder = parser.parse_args(arguments).folder
    found = records.files_of(folder, records.ENDING, records.ENDED) if folder.is_dir() else []
    everyone = records.of_files(found)
    if not everyone:
        parser.error(f"no records of a job that is running or was killed in {folder}")
    flight_record.write(folder, everyone)
    print(f"{folder}: the operations of {ranks_in_words([one.rank for one in everyone])}")
    return 0


def _trace(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{_prog()} trace",
        description="Complete the trace of a job that was killed, from the files that its ranks "
        "have left beside it.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="the job's HORO_LITE_TIMELINE")
    file = parser.parse_args(arguments).file
    ranks = [] if file.is_dir() else timeline.finish(file)
    if not ranks:
        parser.error(f"no rank has left a file beside {file}")
    print(f"{file}: added the operations of {ranks_in_words(ranks)}")
    return 0


def _top(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{_prog()} top",
        description="Show what the ranks of a job are doing: steps per second, the shares of time "
        "in which they wait for each other and exchange, memory, and which rank is slowest. It "
        "does not affect the job. Without an argument it finds the ranks on this host.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "places",
        nargs="*",
        type=Path,
        metavar="FOLDER",
        help="the job's HORO_LITE_FLIGHT_RECORD or HORO_LITE_TIMELINE, for ranks on all hosts",
    )
    add("--interval", type=float, default=1.0, metavar="S", help="seconds between views")
    add("--once", action="store_true", help="show only one view")
    args = parser.parse_args(arguments)
    if not args.interval > 0:
        parser.error("--interval must be more than 0 seconds")
    try:
        return top.main(args.places, interval_s=args.interval, once=args.once)
    except KeyboardInterrupt:
        return 0


_COMMANDS = {
    "bench": _bench,
    "compare": _compare,
    "doctor": _doctor,
    "flight-record": _flight_record,
    "top": _top,
    "trace": _trace,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The job's exit code, or 130 after Ctrl-C, 143 after SIGTERM, 141 if the reader of a
        command's output has gone, 2 for wrong arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        return _command(arguments[0], arguments[1:])
    parser = _parser()
    args = parser.parse_args(arguments[1:] if arguments[:1] == ["run"] else arguments)
    if args.check:
        return doctor.main()
    if args.check_build:
        return doctor.check_build()
    program, variables = _read(parser, args)
    try:
        with jobs.checkpoint_of(args.checkpoint, args.restarts) as checkpoint:
            _run(args, program, variables, checkpoint)
    except (LauncherError, CheckpointError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _command(name: str, arguments: list[str]) -> int:
    try:
        code = _COMMANDS[name](arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _read(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """Check the arguments, and set `n` and `hosts` if others imply them.

    Returns:
        The command of each rank, and the environment variables that the arguments imply.
    """
    program = ["-m", *args.module] if args.module else args.program
    if not program:
        parser.error("no program was given (only `doctor` needs none)")
    if args.hosts and args.hostfile:
        parser.error("use --hosts or --hostfile, not both")
    try:
        args.hosts = hostfile.read_hostfile(args.hostfile) if args.hostfile else args.hosts
    except LauncherError as error:
        parser.error(str(error))
    if args.n is None and args.hosts:
        args.n = hostfile.n_ranks(args.hosts)
    if args.n is None or args.n < 1:
        parser.error("-n must be 1 or more, and precede the program: -n 4 train.py")
    if args.restarts < 0:
        parser.error("--restarts must be 0 or more")
    if program[0] == "-m" or program[0].endswith(".py"):
        if program[0] != "-m" and not os.path.exists(program[0]):
            parser.error(f"there is no {program[0]}")
        program = [sys.executable, *program]
    if shutil.which(program[0]) is None:
        parser.error(f"there is no {program[0]}")
    variables = horovodrun.variables(args)
    if args.output_filename:
        program = output.wrapped(args.output_filename, args.n, program)
    if args.timeline_filename:
        variables[_TIMELINE] = os.path.abspath(args.timeline_filename)
    if args.record_steps:
        variables[_STEPS] = os.path.abspath(args.record_steps)
    if args.noise_every is not None:
        variables[_NOISE] = str(args.noise_every)
    if args.as_horovod or args.as_horovod_anyway:
        found = None if args.as_horovod_anyway else aliases.installed_horovod()
        if found:
            parser.error(f"{found}: uninstall it, or use --as-horovod-anyway")
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [aliases.PATH, os.environ.get("PYTHONPATH")])
        )
    return program, variables


def _run(
    args: argparse.Namespace, program: list[str], variables: dict[str, str], checkpoint: str | None
) -> None:
    """Run the job to its end; without restarts, its launcher replaces this process.

    Raises:
        SystemExit: The job has failed, and no restarts are left.
    """
    if checkpoint:
        variables[jobs.CHECKPOINT] = checkpoint
    env = jobs.environment(variables | {jobs.RESTART: "0"})
    # With fault tolerance mpiexec's exit code is 0 even if all ranks were killed.
    end = Path(f"{checkpoint}.end") if args.elastic and args.restarts else None
    if end:
        env[jobs.END] = str(end)
    mpiexec = None
    if args.n > 1 or args.hosts or args.elastic or args.mpiexec_args:
        mpiexec = jobs.find_mpiexec()
        program = mpiexec.command(
            program,
            args.n,
            hosts=args.hosts,
            elastic=args.elastic,
            more=shlex.split(args.mpiexec_args),
            env=env,
        )
    if args.verbose:
        horovodrun.show(program)
    if not args.restarts:
        if mpiexec is not None and mpiexec.name == "Open MPI":
            jobs.guard_launcher()
        os.execvpe(program[0], program, env)

    def attempt(number: int) -> jobs.Failure | None:
        if end:
            end.unlink(missing_ok=True)
        job = jobs.Job(program, env | {jobs.RESTART: str(number)})
        code, why = job.wait(), ""
        if end and not code:
            if not end.exists() or "MPI_ABORT was invoked" in job.tail:
                why = "no rank reached the end of its program"
            end.unlink(missing_ok=True)
        if not code and not why:
            return None
        return jobs.failure_of(code, why, jobs.cause(job.tail))

    with contextlib.ExitStack() as stack:
        if not args.hosts:
            place = tempfile.TemporaryDirectory(prefix="hvd-", ignore_cleanup_errors=True)
            jobs.set_session_folder(env, stack.enter_context(place))
        # Termination on request is not a failure of the job, which is then not restarted.
        with jobs.ended_by_signals():
            failure = jobs.until_done(attempt, restarts=args.restarts, checkpoint=checkpoint)
    if failure is not None:
        code = failure.returncode or 1
        raise SystemExit(128 - code if code < 0 else code)  # an exception, so commits are kept


if __name__ == "__main__":
    sys.exit(main())
