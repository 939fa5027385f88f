"""Ray and Dask on two hosts, with the same bits as a job that mpiexec starts on them.

    make test-clusters CLUSTERS=                                  # makes the environment
    sudo .venv-clusters/bin/python tests/by_hand/clusters.py

The hosts are network namespaces of this machine (tests/support/network.py), which needs root. It is
run by hand: the clusters take a minute to start.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

from network import Host, Network, environment  # noqa: E402

BITS = ROOT / "tests" / "hosts" / "bits_ranks.py"
SHAPE = [2, 1]
LINE = re.compile(r"rank (\d) at (\S+ \S+) on (\S+): ([0-9a-f]{64})")
BIN = Path(sys.executable).parent
DRIVER = """
import contextlib, io, runpy, sys
import horo_lite as hvd

def job(path):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(path)
    return out.getvalue()

{connect}
print("".join(hvd.run(job, ({bits!r},), np=3, on={name!r})))
"""
CONNECT = {
    "ray": 'import ray; ray.init(address="{address}:6379", log_to_driver=False)',
    "dask": 'from distributed import Client; client = Client("{address}:8786")',
}


def start(host: Host, line: str, env: dict[str, str]) -> str:
    """Return what a command prints that runs on a host, and may leave daemons there."""
    done = subprocess.run(
        host.command(["bash", "-c", line]),
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{line}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def start_ray(hosts: list[Host], env: dict[str, str]) -> None:
    """The two nodes must not share the files in which each finds its own daemons."""
    common = "--object-store-memory 100000000 --disable-usage-stats"
    for host, n in zip(hosts, SHAPE, strict=True):
        role = f"--address {hosts[0].address}:6379"
        if host is hosts[0]:
            role = "--head --port 6379 --include-dashboard=false --temp-dir /run/ray"
        mount = "mkdir -p /run/ray && mount -t tmpfs tmpfs /run/ray"
        ray = f"{BIN}/ray start {role} --node-ip-address {host.address} --num-cpus {n} {common}"
        start(host, f"{mount} && {ray}", env)


def start_dask(hosts: list[Host], env: dict[str, str]) -> None:
    first = hosts[0].address
    quiet = "</dev/null >/dev/null 2>&1 &"
    start(hosts[0], f"cd /; {BIN}/dask scheduler --host {first} --no-dashboard {quiet}", env)
    for host, n in zip(hosts, SHAPE, strict=True):
        worker = f"{BIN}/dask worker {first}:8786 --host {host.address} --nthreads {n}"
        start(host, f"cd /dev/shm; {worker} --no-dashboard {quiet}", env)


def run_on(name: str, hosts: list[Host], env: dict[str, str]) -> str:
    connect = CONNECT[name].format(address=hosts[0].address)
    if name == "dask":
        connect += "\nclient.wait_for_workers(2, timeout=120)"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(DRIVER.format(connect=connect, bits=str(BITS), name=name))
        file.flush()
        return start(hosts[0], f"{sys.executable} {file.name}", env)


def main() -> None:
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    found = {}
    for name in ("mpiexec", "ray", "dask"):
        with Network(len(SHAPE), rate_mbit=1000) as network:
            if name == "mpiexec":
                command = network.launch("openmpi", str(BIN / "mpiexec"), SHAPE)
                root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
                done = subprocess.run(
                    [*command, sys.executable, str(BITS)],
                    env=env | environment("openmpi") | root,
                    capture_output=True,
                    text=True,
                    timeout=300,
                    check=True,
                )
                said = done.stdout
            else:
                {"ray": start_ray, "dask": start_dask}[name](network.hosts, env)
                said = run_on(name, network.hosts, env)
        lines = sorted(LINE.findall(said))
        places = [line[1:3] for line in lines]
        expected = [("0/2 0/2", "host0"), ("1/2 0/1", "host0"), ("0/1 1/2", "host1")]
        assert places == expected, said
        found[name] = {digest for *_, digest in lines}
        print(f"{name}: {' '.join(found[name])}", flush=True)
    assert len(set().union(*found.values())) == 1, "the bits differ"
    print("all of them have the same bits")


if __name__ == "__main__":
    main()
