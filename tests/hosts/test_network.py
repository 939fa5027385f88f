"""The simulated network itself: tests/support/network.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from network import INTERFACE, Host, Network, no_flow_limits, unavailable

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]
measures = pytest.mark.two_at_a_time

SUPPORT = Path(__file__).resolve().parents[1] / "support"
N_BYTES = 1_000_000
# Receives the given number of connections concurrently, until each ends; prints the seconds since
# the first byte.
RECEIVE = """
import socket, sys, threading, time
server = socket.create_server(("", 5000))
print("listens", flush=True)
connections = [server.accept()[0] for _ in range(int(sys.argv[1]))]
began = time.monotonic()
total = []
def receive(connection):
    n = 0
    while part := connection.recv(1 << 16):
        n += len(part)
    total.append(n)
threads = [threading.Thread(target=receive, args=(c,)) for c in connections]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sum(total), time.monotonic() - began)
"""
SEND = """
import socket, sys
address, n_flows, n_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connections = [socket.create_connection((address, 5000)) for _ in range(n_flows)]
print("connected", flush=True)
import threading
threads = [threading.Thread(target=c.sendall, args=(bytes(n_bytes),)) for c in connections]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for connection in connections:
    connection.close()
"""


def python(host: Host, code: str, *args: object) -> subprocess.Popen[str]:
    command = host.command([sys.executable, "-c", code, *map(str, args)])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def seconds_to_send(hosts: Sequence[Host], n_flows: int = 1, n_bytes: int = N_BYTES) -> float:
    """Return the seconds to send the bytes over `n_flows` connections from first to second host."""
    receiver = python(hosts[1], RECEIVE, n_flows)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "listens\n"
    sender = python(hosts[0], SEND, hosts[1].address, n_flows, n_bytes)
    assert sender.wait(60) == 0  # first: without it, the receiver would wait for ever
    out, _ = receiver.communicate(timeout=10)
    total, seconds = out.split()
    assert int(total) == n_flows * n_bytes
    return float(seconds)


@measures
def test_a_link_is_not_faster_than_its_rate() -> None:
    with Network(2, rate_mbit=10) as network:
        limited_s = seconds_to_send(network.hosts)
    # Except for the initial burst.
    assert limited_s > 0.8 * 8 * N_BYTES / 10e6
    with Network(2, rate_mbit=1000) as network:
        assert min(seconds_to_send(network.hosts) for _ in range(3)) < limited_s


@measures
@pytest.mark.skipif(bool(no_flow_limits()), reason=f"no limits for a flow: {no_flow_limits()}")
def test_flows_have_limits_of_their_own() -> None:
    with Network(2, rate_mbit=400, flow_mbit=20) as network:
        n_bytes = 4 * N_BYTES
        one_s = seconds_to_send(network.hosts, 1, n_bytes)
        assert one_s > 0.8 * 8 * n_bytes / 20e6
        # Of 8 flows two may fall into one class, but hardly all of them.
        assert seconds_to_send(network.hosts, 8, n_bytes) < 4 * one_s


def test_hosts_are_told_apart_and_see_nothing_of_each_other() -> None:
    look = "import os, socket; print(socket.gethostname(), len(os.listdir('/proc/1')) > 0,"
    look += " sum(name.isdigit() for name in os.listdir('/proc')), os.listdir('/dev/shm'))"
    with Network(2) as network:
        subprocess.run(network.hosts[0].command(["touch", "/dev/shm/mine"]), check=True)
        first, second = (python(host, look).communicate(timeout=30)[0] for host in network.hosts)
        # Two processes: the first one, and the one that lists them.
        assert first == "host0 True 2 ['mine']\n"
        assert second == "host1 True 2 []\n"


def test_a_link_is_cut_and_mended() -> None:
    with Network(2, rate_mbit=5) as network:
        mender = threading.Timer(1.5, network.mend, [network.hosts[1]])
        receiver = python(network.hosts[1], RECEIVE, 1)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sender = python(network.hosts[0], SEND, network.hosts[1].address, 1, 2 * N_BYTES)
        assert sender.stdout is not None
        assert sender.stdout.readline() == "connected\n"
        network.cut(network.hosts[1])
        mender.start()
        out, _ = receiver.communicate(timeout=60)
        sender.wait(10)
        total, seconds = out.split()
        assert int(total) == 2 * N_BYTES
        # Except for the initial burst.
        assert float(seconds) > 1.3 + 0.8 * 8 * 2 * N_BYTES / 5e6


def test_a_host_vanishes_alone() -> None:
    with Network(2) as network:
        sleepers = [python(host, "import time; time.sleep(300)") for host in network.hosts]
        network.hosts[1].vanish()
        assert sleepers[1].wait(10) != 0
        assert sleepers[0].poll() is None
    assert sleepers[0].wait(10) != 0


def test_nothing_is_left_when_whoever_made_it_is_killed() -> None:
    code = f"""
import subprocess, sys, time
sys.path.append({str(SUPPORT)!r})
from network import Network
network = Network(2)
subprocess.Popen(network.hosts[1].command(["sleep", "300"]))
time.sleep(0.2)
print(*(host.pid for host in network.hosts), network.switch_pid, flush=True)
time.sleep(300)
"""
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 3
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    until = time.monotonic() + 30
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


# Sends bytes back and forth, one at a time; prints the shortest round trip in seconds.
ANSWER = """
import socket
server = socket.create_server(("", 5000))
print("listens", flush=True)
connection = server.accept()[0]
while part := connection.recv(1):
    connection.sendall(part)
"""
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
seconds = []
for _ in range(20):
    began = time.monotonic()
    connection.sendall(b"x")
    connection.recv(1)
    seconds.append(time.monotonic() - began)
print(min(seconds))
"""


@measures
def test_a_message_takes_as_long_as_the_link_is_said_to_take() -> None:
    with Network(3, rate_mbit=100, delay_ms=20) as network:
        answers = python(network.hosts[0], ANSWER)
        assert answers.stdout is not None
        answers.stdout.readline()
        asks = python(network.hosts[2], ASK, network.hosts[0].address)
        round_trip_s = float(asks.communicate(timeout=60)[0])
    assert round_trip_s > 2 * 0.020
    assert round_trip_s < 2 * 0.020 + 0.015  # the fastest of 20, also when other programs run


def packets_sent_again(host: Host) -> int:
    counters = host.command(["cat", "/proc/net/snmp"])
    names, values = (
        line.split()
        for line in subprocess.check_output(counters, text=True).splitlines()
        if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


@measures
def test_what_is_lost_is_sent_again() -> None:
    with Network(2, rate_mbit=100, loss=0.1) as network:
        seconds_to_send(network.hosts)
        sent_again = packets_sent_again(network.hosts[0])
    n_frames = N_BYTES / 1448
    assert 0.05 * n_frames < sent_again < 0.3 * n_frames


def test_a_host_finds_another_however_much_is_lost() -> None:
    """Otherwise there would be no route to it now and then, which no real loss brings about."""
    connect = "import socket; socket.create_connection((%r, 5000), timeout=1)"
    with Network(2, loss=1.0) as network:
        lost = python(network.hosts[0], connect % network.hosts[1].address)
        assert lost.wait(30) != 0
        until, found = time.monotonic() + 30, ""
        while "lladdr" not in found and time.monotonic() < until:
            found = subprocess.check_output(network.hosts[0].command(["ip", "neigh"]), text=True)
    assert f"{network.hosts[1].address} dev {INTERFACE} lladdr" in found


@measures
def test_a_link_with_a_delay_loses_nothing_where_two_hosts_send_to_one() -> None:
    """Packets arrive at twice the link's rate, and wait in its queue, which holds 4 MiB."""
    with Network(3, rate_mbit=100, delay_ms=5) as network:
        receiver = python(network.hosts[1], RECEIVE, 2)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listens\n"
        sources = (network.hosts[0], network.hosts[2])
        senders = [python(host, SEND, network.hosts[1].address, 1, 2 * N_BYTES) for host in sources]
        assert int(receiver.communicate(timeout=60)[0].split()[0]) == 4 * N_BYTES
        assert [sender.wait(10) for sender in senders] == [0, 0]
        assert sum(map(packets_sent_again, sources)) < 0.005 * 4 * N_BYTES / 1448


@measures
def test_a_link_with_a_delay_is_cut_and_nothing_is_left() -> None:
    with Network(2, delay_ms=1) as network:
        network.cut(network.hosts[1])
        # Until there is no route: earlier, the next connection would share its ARP requests.
        connect = "import socket; socket.create_connection((%r, 5000), timeout=10)"
        cut = python(network.hosts[0], connect % network.hosts[1].address)
        assert cut.wait(30) != 0
        network.mend(network.hosts[1])
        assert seconds_to_send(network.hosts) < 10
