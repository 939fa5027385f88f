"""Several hosts on one machine: namespaces joined by links of a given rate.

A host is a set of namespaces (network, processes, hostname, mounts, System V memory) with its own
address, like a container: its ranks can reach those of other hosts only by TCP. Every host has one
link to a switch, which limits what it sends and what it receives. The launcher runs at the switch,
beside the hosts, as on a login node, and starts its daemons through a script that replaces ssh.

    with Network(2, rate_mbit=1000) as network:
        subprocess.run(network.launch("mpich", mpiexec, 2) + [python, "train.py"], env=…)

Nothing has a name outside of these namespaces, and each lives as long as its first process, which
ends when its standard input does: whatever happens to the process that made a network, the kernel
removes all of it, with every process in it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

INTERFACE = "eth0"
"""The interface of every host, and of the switch."""
_SUBNET = "10.77.0"
_SWITCH_ADDRESS = f"{_SUBNET}.254"
_SWITCH_MAC = "02:00:00:00:00:fe"
_TOOLS = ("ip", "tc", "unshare", "nsenter")
# A first process reaps its orphans, which `trap ''` leaves to the kernel. The mounts show what
# belongs to these namespaces: MPI looks for interfaces in /sys, and for memory in /dev/shm.
_FIRST_PROCESS = """
trap '' CHLD
ip link set lo up
if [ "$1" ]; then
  hostname "$1" && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm || exit
fi
echo ready
exec cat
"""
# Replaces ssh: ignores options, takes a host and a command for that host's shell, and returns 255
# if the connection is lost.
_REMOTE_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
case $host in
%s
*) echo "no host $host" >&2; exit 255 ;;
esac
shift
nsenter --target $pid --mount --uts --ipc --net --pid sh -c "$*"
status=$?
[ $status -lt 128 ] || { echo "Connection to $host closed by remote host." >&2; status=255; }
exit $status
"""
# Classes of HTB, one per flow: more than there are flows, so that two rarely share one.
_N_FLOW_CLASSES_BITS = 10
_RELAY = str(Path(__file__).with_name("relay.py"))
_FIRST_FLOW_CLASS = 0x10


class Host:
    """One of the hosts of a network.

    Attributes:
        name: Its hostname.
        address: Its address, by which launchers know it.
        pid: The pid of its first process, as seen by the test.
        link: The switch's port for it.
    """

    def __init__(self, number: int) -> None:
        self.name = f"host{number}"
        self.address = f"{_SUBNET}.{number + 1}"
        self.link = f"to-{self.name}"
        self._namespaces = _Namespaces(self.name)
        self.pid = self._namespaces.pid

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on this host."""
        return [*_enter(self.pid, "mount", "uts", "ipc", "net", "pid"), *command]

    def vanish(self) -> None:
        """Kill every process on this host at once; its link is removed with it."""
        self._namespaces.close()


class Network:
    """Hosts joined by a switch.

    Args:
        n_hosts: The number of hosts.
        rate_mbit: Rate of each link and direction, in 10^6 bits per second; None for no limit.
        flow_mbit: Rate of each TCP connection; None for no limit.
        delay_ms: Delay of a message between two hosts.
        loss: The fraction of packets that are lost. With losses, a packet is one frame, as on
            a real link. In the simulation a process moves every packet: it needs a core at 1 Gbit/s
            (with a loss, at 200 Mbit/s).

    Attributes:
        hosts: The hosts.
        switch_pid: The pid of the first process of the switch's namespace.

    Raises:
        OSError: The kernel lacks a feature: see `unavailable` and `no_flow_limits`.
    """

    def __init__(
        self,
        n_hosts: int,
        *,
        rate_mbit: float | None = None,
        flow_mbit: float | None = None,
        delay_ms: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        self._stack = contextlib.ExitStack()
        is_relayed, pairs = bool(delay_ms or loss), []
        with contextlib.ExitStack() as stack:
            self.hosts = []
            for number in range(n_hosts):
                self.hosts.append(Host(number))
                stack.callback(self.hosts[-1].vanish)
            cases = (f"{host.address}) pid={host.pid} ;;" for host in self.hosts)
            script = _file_without_name(_REMOTE_SHELL % "\n".join(cases))
            try:
                switch = stack.enter_context(contextlib.closing(_Namespaces("", script)))
            finally:
                os.close(script)
            self.switch_pid = switch.pid
            self._remote_shell = f"/proc/{switch.pid}/fd/{script}"
            self._in_switch(
                f"link add {INTERFACE} address {_SWITCH_MAC} type bridge",
                f"addr add {_SWITCH_ADDRESS}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            )
            for host in self.hosts:
                end = host.link if not is_relayed else f"end-{host.name}"
                self._in_switch(
                    f"link add {end} type veth peer name {INTERFACE} netns {host.pid}",
                    f"link set {end} up",
                )
                inside = _enter(host.pid, "net")
                _batch(
                    [*inside, "ip"],
                    f"addr add {host.address}/24 dev {INTERFACE}",
                    f"link set {INTERFACE} up {'gso_max_segs 1' if loss else ''}",
                )
                if is_relayed:
                    leaves = f"in-{host.name}"
                    self._in_switch(
                        f"link add {host.link} type veth peer name {leaves}",
                        f"link set {host.link} up",
                        f"link set {leaves} up",
                    )
                    pairs.append(f"{leaves}:{end}")
                self._in_switch(f"link set {host.link} master {INTERFACE}")
                _batch([*inside, "tc"], *_limits(INTERFACE, rate_mbit, flow_mbit))
                # Between two hosts, what one receives the other has sent, which is limited already.
                arriving = _limits(end, rate_mbit if n_hosts > 2 else None, None)
                _batch([*_enter(self.switch_pid, "net"), "tc"], *arriving)
            if is_relayed:
                stack.enter_context(self._relay(delay_ms, loss, pairs))
            self._stack = stack.pop_all()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process on every host, and remove the network."""
        self._stack.close()

    def launch(self, mpi: str, mpiexec: str, ranks: int | Sequence[int]) -> list[str]:
        """Return the beginning of a command that starts ranks on the hosts; their program follows.

        Args:
            mpi: `openmpi` or `mpich`.
            mpiexec: The launcher's path.
            ranks: Of each host, or of every one. Ranks are numbered host by host.
        """
        counts = [ranks] * len(self.hosts) if isinstance(ranks, int) else list(ranks)
        slots = ",".join(f"{h.address}:{n}" for h, n in zip(self.hosts, counts, strict=True))
        command = [*_enter(self.switch_pid, "net"), mpiexec]
        if mpi == "openmpi":
            command += ["--host", slots, "--prtemca", "plm_ssh_agent", self._remote_shell]
            # Daemons look for that script, too, unless they do not start any others themselves.
            command += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]
            # Without binding: all hosts have the same cores, and each would use the first of them.
            command += ["--map-by", "slot:nooversubscribe", "--bind-to", "none"]
        else:
            command += ["-launcher", "ssh", "-launcher-exec", self._remote_shell]
            command += ["-iface", INTERFACE, "-hosts", slots]
        return [*command, "-n", str(sum(counts))]

    def cut(self, host: Host) -> None:
        """Cut a host's link: nothing arrives on either side, and neither is notified."""
        # The ends stay up, or the kernel would report that the network is unreachable. Without its
        # own MAC address the bridge would have that of one link, and the launcher would still
        # receive from that host; with ARP it would answer there, too.
        self._in_switch(f"link set {host.link} nomaster arp off")

    def mend(self, host: Host) -> None:
        """Restore a link that was cut."""
        self._in_switch(f"link set {host.link} master {INTERFACE} arp on")

    @contextlib.contextmanager
    def _relay(self, delay_ms: float, loss: float, pairs: Sequence[str]) -> Iterator[None]:
        relay = subprocess.Popen(
            [
                *_enter(self.switch_pid, "net"),
                sys.executable,
                _RELAY,
                str(delay_ms),
                str(loss),
                *pairs,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert relay.stdout is not None
            if relay.stdout.readline() != "ready\n":
                raise OSError(relay.communicate()[1])
            yield
        finally:
            relay.kill()
            relay.communicate()

    def _in_switch(self, *lines: str) -> None:
        _batch([*_enter(self.switch_pid, "net"), "ip"], *lines)


def environment(mpi: str) -> dict[str, str]:
    """Return the variables with which ranks use TCP between hosts, and nothing else."""
    if mpi == "mpich":
        own = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE}
    else:
        own = {
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,sm,self",
            "OMPI_MCA_btl_tcp_if_include": INTERFACE,
            "PRTE_MCA_oob_tcp_if_include": INTERFACE,
            "PMIX_MCA_ptl_tcp_if_include": INTERFACE,
            # All hosts share the cores of one machine, so a waiting rank must yield them.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # Processes of different hosts have the same pids: files named by them must not collide.
            "PRTE_MCA_prte_remote_tmpdir_base": "/dev/shm",
        }
    return own | {"GLOO_SOCKET_IFNAME": INTERFACE}


@functools.cache
def unavailable() -> str:
    """Return why there can be no hosts on this machine, with the remedy; "" if there can."""
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not found: install iproute2 and util-linux"
    try:
        Network(1, rate_mbit=1000).close()
    except OSError as error:
        why = f"hosts and links cannot be made ({error})"
        if os.geteuid() != 0:
            return f"{why}: run this as root, or under `unshare --user --map-root-user`"
        return f"{why}: this needs CAP_SYS_ADMIN and CAP_NET_ADMIN (docker run --privileged)"
    return ""


@functools.cache
def no_flow_limits() -> str:
    """Return why the kernel cannot limit each connection on a link; "" if it can."""
    try:
        Network(1, rate_mbit=1000.0, flow_mbit=250.0).close()
    except OSError as error:
        return str(error)
    return ""


class _Namespaces:
    """Namespaces that live as long as this object, or this process.

    With a name they are a host's; without one there is only a network. The first process keeps
    `file` open, if there is one.
    """

    def __init__(self, name: str, file: int | None = None) -> None:
        kinds = ["--net"]
        if name:
            kinds += ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
            kinds += ["--mount-proc"]
        self._process = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", _FIRST_PROCESS, "sh", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the job only
            pass_fds=() if file is None else (file,),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() != b"ready\n":
            error = self._process.stderr.read().decode(errors="replace")
            self.close()
            raise OSError(error.strip() or "unshare failed")
        self.pid = self._process.pid
        if name:  # unshare's child is the first process
            self.pid = int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _file_without_name(text: str) -> int:
    """Return the descriptor of an executable file, which is removed with its last descriptor."""
    file = os.memfd_create("remote-shell", 0)
    try:
        os.write(file, text.encode())
        # A file that is open for writing cannot be executed.
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(file)


def _enter(pid: int, *kinds: str) -> list[str]:
    return ["nsenter", "--target", str(pid), *(f"--{kind}" for kind in kinds)]


def _batch(command: Sequence[str], *lines: str) -> None:
    """Run lines of `ip` or `tc` at once."""
    if not lines:
        return
    done = subprocess.run(
        [*command, "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{command[-1]}: {' '.join(done.stderr.split())}")


def _limits(device: str, rate_mbit: float | None, flow_mbit: float | None) -> list[str]:
    """Return the lines of `tc` that limit what a device sends, in total and per flow."""
    if rate_mbit is None:
        assert flow_mbit is None, "a limit for flows needs one for the link"
        return []
    # Bursts of at most 0.2 ms of the rate, and no less than a packet as the kernel passes it on.
    burst = max(1 << 17, int(rate_mbit * 1e6 / 8 * 0.2e-3))
    # A queue of 0.1 s: TCP holds back its own packets, and those of many connections fit.
    queue = max(1 << 22, int(rate_mbit * 1e6 / 8 * 0.1))
    if flow_mbit is None:
        return [
            f"qdisc add dev {device} root handle 10: tbf"
            f" rate {rate_mbit}mbit burst {burst} limit {queue}"
        ]
    classes = range(_FIRST_FLOW_CLASS, _FIRST_FLOW_CLASS + (1 << _N_FLOW_CLASSES_BITS))
    own = rate_mbit / len(classes)
    return [
        f"qdisc add dev {device} root handle 1: htb default 2",
        f"class add dev {device} parent 1: classid 1:1 htb"
        f" rate {rate_mbit}mbit ceil {rate_mbit}mbit burst {burst} cburst {burst}",
        f"class add dev {device} parent 1:1 classid 1:2 htb rate 1mbit ceil {rate_mbit}mbit",
        *(
            f"class add dev {device} parent 1:1 classid 1:{number:x} htb rate {own}mbit"
            f" ceil {flow_mbit}mbit burst {1 << 16} cburst {burst} quantum {1 << 16}"
            for number in classes
        ),
        f"filter add dev {device} parent 1: protocol ip bpf bytecode '{_class_of_flow()}'",
    ]


def _class_of_flow() -> str:
    """Return a program of classic BPF that maps a TCP packet to its class, by both of its ports."""
    load_half, load_byte, load_word = 0x28, 0x30, 0x20  # at an offset in the frame
    unless_equal, multiply, shift_right, add, return_a, return_k = 0x15, 0x24, 0x74, 4, 0x16, 6
    program = [
        (load_half, 0, 0, 12),
        (unless_equal, 0, 7, 0x0800),  # IPv4
        (load_byte, 0, 0, 23),
        (unless_equal, 0, 5, 6),  # TCP; its header follows 20 bytes of IP's
        (load_word, 0, 0, 34),
        (multiply, 0, 0, 0x9E3779B1),  # Knuth's hash
        (shift_right, 0, 0, 32 - _N_FLOW_CLASSES_BITS),
        (add, 0, 0, 0x10000 + _FIRST_FLOW_CLASS),
        (return_a, 0, 0, 0),
        (return_k, 0, 0, 0),  # no class: the default
    ]
    return f"{len(program)}," + ",".join(" ".join(map(str, each)) for each in program)
