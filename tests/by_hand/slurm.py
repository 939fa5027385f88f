"""Jobs on a real Slurm of two nodes, with the same bits as a job without Slurm.

    apt-get install slurm-wlm munge        # once, on a machine or in a container of your own
    sudo python tests/by_hand/slurm.py --openmpi .venv/bin/python --mpich .venv-mpich/bin/python

Both nodes are this machine; to the ranks HORO_LITE_TEST_HOSTS makes two hosts of it. It is run by
hand and needs root, because Slurm's daemons do. They run with a configuration of their
own in a temporary directory, and end with this program, as does munged unless one runs already.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BITS = ROOT / "tests" / "hosts" / "bits_ranks.py"
TORCH = ROOT / "tests" / "by_hand" / "slurm_torch_ranks.py"
N = 3
CONFIG = """
ClusterName=byhand
SlurmctldHost={host}
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ctld}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 State=UNKNOWN
NodeName={host}2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host},{host}2 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(n)]
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment in which commands find Slurm's daemons."""
    host, (ctld, first, second) = socket.gethostname().split(".")[0], free_ports(3)
    for name in ("state", host, f"{host}2"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(host=host, folder=folder, ctld=ctld, first=first, second=second)
    )
    # No cgroup is used, but slurmd 22 requires their version.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    env = {**os.environ, "SLURM_CONF": str(config)}
    sbin = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    programs = {name: shutil.which(name, path=sbin) for name in ("munged", "slurmctld", "slurmd")}
    if absent := [name for name, program in programs.items() if program is None]:
        raise SystemExit(f"no {', '.join(absent)}: apt-get install slurm-wlm munge")
    daemons: list[subprocess.Popen[bytes]] = []

    def start(name: str, *args: str, **options: str) -> None:
        command = [str(programs[name]), *args]
        daemons.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, **options))

    try:
        if not munge_answers():
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            start("munged", "--foreground", user="munge", group="munge")
            until = time.monotonic() + 20
            while not munge_answers():
                if time.monotonic() > until or daemons[0].poll() is not None:
                    raise SystemExit("munged does not answer: see /var/log/munge/munged.log")
                time.sleep(0.1)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", host)
        start("slurmd", "-D", "-N", f"{host}2")
        until = time.monotonic() + 60
        while output(["sinfo", "-h", "-o", "%T %D"], env, check=False).strip() != "idle 2":
            if time.monotonic() > until or any(d.poll() is not None for d in daemons):
                logs = "\n".join(f.read_text()[-3000:] for f in folder.glob("*.log"))
                raise SystemExit(f"the node does not become idle:\n{logs}")
            time.sleep(0.5)
        yield env
    finally:
        for daemon in reversed(daemons):  # Slurm's daemons notify each other through munged
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:  # slurmd 22 may wait for a step that has ended
                daemon.kill()


def munge_answers() -> bool:
    return subprocess.run(["munge", "-n"], capture_output=True).returncode == 0


def output(command: list[str], env: dict[str, str], *, check: bool = True) -> str:
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=180, cwd="/", check=False
    )
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout + (done.stderr if done.returncode else "")


def batch(lines: str, env: dict[str, str], folder: Path) -> str:
    """Return what a script for sbatch prints."""
    script, out = folder / "job.sh", folder / "job.out"
    script.write_text(f"#!/bin/bash\n{lines}\n")
    output(
        ["sbatch", "--wait", "-N", "2", "-n", str(N), "-o", str(out), str(script)], env, check=False
    )
    return out.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--openmpi", help="a Python with Open MPI", required=True)
    parser.add_argument("--mpich", help="a Python with MPICH", required=True)
    args = parser.parse_args()
    os.environ["HORO_LITE_TEST_HOSTS"] = "2,1"  # two hosts, so that MPI or gloo is used
    os.environ["HORO_LITE_START_TIMEOUT_S"] = "60"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
    pythons = {name: os.path.abspath(getattr(args, name)) for name in ("openmpi", "mpich")}
    mpiexecs = {name: str(Path(python).parent / "mpiexec") for name, python in pythons.items()}
    job = f"{BITS}"
    digests: dict[str, set[str]] = {}
    torch_digests: dict[str, set[str]] = {}

    def record(what: str, said: str, digests: dict[str, set[str]] = digests) -> None:
        found = re.findall(r"rank \d at (?:\S+ ){2}on \S+: ([0-9a-f]{64})", said)
        digests[what] = set(found)
        right = len(found) == N and len(set(found)) == 1
        print(f"{'ok ' if right else 'BAD'} {what}", flush=True)
        if not right:
            print(said)

    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        with cluster(folder) as env:
            print(output(["srun", "--version"], env).strip())
            listed = subprocess.run(
                ["srun", "--mpi=list"], env=env, capture_output=True, text=True, check=False
            )
            kinds = listed.stdout + listed.stderr
            print(kinds)
            srun = ["srun", "-N", "2", "-n", str(N)]
            for mpi, kind in (("mpich", "pmi2"), ("openmpi", "pmix")):
                if kind in kinds.split():
                    command = [*srun, f"--mpi={kind}", pythons[mpi], job]
                    record(f"srun --mpi={kind}, {mpi}", output(command, env, check=False))
            for mpi in pythons:
                line = f"{mpiexecs[mpi]} -n {N} {pythons[mpi]} {job} 2>&1"
                record(f"sbatch, mpiexec of {mpi}", batch(line, env, folder))
            master = "export MASTER_ADDR=$(scontrol show hostnames | head -1) MASTER_PORT=29517\n"
            line = f"{master} srun --mpi=none {pythons['openmpi']} {job} 2>&1"
            record("sbatch, srun without MPI, MASTER_ADDR", batch(line, env, folder))
            own = env | {"HORO_LITE_ADDRESS": f"{socket.gethostname()}:29518"}
            command = [*srun, "--mpi=none", pythons["openmpi"], job]
            record("srun without MPI, HORO_LITE_ADDRESS", output(command, own, check=False))
            command = [*srun, "--mpi=none", pythons["openmpi"], job]
            refused = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=180, cwd="/", check=False
            )
            assert "HORO_LITE_ADDRESS=<host of rank 0>" in refused.stderr, refused.stderr
            print("ok  srun without MPI and without an address is refused")
            for mpi, kind in (("mpich", "pmi2"), ("openmpi", "pmix"), ("openmpi", "none")):
                python = pythons[mpi]
                has_torch = (
                    subprocess.run(
                        [python, "-c", "import torch"], stderr=subprocess.DEVNULL
                    ).returncode
                    == 0
                )
                if has_torch and (kind == "none" or kind in kinds.split()):
                    own = env | {"HORO_LITE_ADDRESS": f"{socket.gethostname()}:29519"}
                    said = output(
                        [*srun, f"--mpi={kind}", python, str(TORCH)],
                        own if kind == "none" else env,
                        check=False,
                    )
                    record(f"torch.distributed, srun --mpi={kind}, {mpi}", said, torch_digests)
                else:
                    print(
                        f"--  torch.distributed, srun --mpi={kind}, {mpi}: no PyTorch, or no {kind}"
                    )
        for mpi in pythons:
            command = [mpiexecs[mpi], "-n", str(N), pythons[mpi], job]
            record(f"without Slurm, mpiexec of {mpi}", output(command, dict(os.environ)))
    everything = set().union(*digests.values())
    with_torch = set().union(*torch_digests.values())
    if len(everything) != 1 or not all([*digests.values(), *torch_digests.values()]):
        sys.exit("the bits differ")
    if len(with_torch) > 1:
        sys.exit("the bits of torch.distributed differ")
    print(f"all of them have the same bits: {everything.pop()}")


if __name__ == "__main__":
    main()
