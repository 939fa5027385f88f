"""The C++ core. Made by nanobind's stub generator, element types added by hand."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

def instruction_set() -> str:
    """Which build of the host kernels runs: avx512, avx2 or portable."""

def use_instruction_set(name: str) -> None: ...
def hash64(data: bytes) -> int:
    """A 63-bit hash that is the same in every process."""

class Tensors:
    """Addresses of a list of arrays, which are kept alive until this is dropped."""

    def __init__(
        self, arrays: Sequence[object], writable: bool = True, stream: int | None = None
    ) -> None: ...
    @property
    def device(self) -> int: ...
    def rows(self, ranges: Sequence[tuple[int, int]]) -> Tensors:
        """Of each array the rows from `begin` to `end` that it is given."""

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def signature(self) -> int: ...
    @property
    def dtypes(self) -> int: ...
    @property
    def layout(self) -> int: ...
    @property
    def strided(self) -> list[int]: ...
    @property
    def addresses(self) -> list[int]: ...
    def buffers(self) -> list[tuple[int, int]]:
        """Address and size in bytes of each."""

    def overlaps(self, other: Tensors | None = None) -> list[tuple[int, int, int, bool]]:
        """(first, second, distance in bytes, whether they are one tensor) of each overlapping pair.

        Of these, or of these and `other`. Twice the same index: its own elements share memory.
        """

    def describe(self, index: int) -> str: ...
    def outline(self) -> Tensors: ...
    def shape(self, index: int) -> list[int]: ...
    def itemsize(self, index: int) -> int: ...
    def is_number(self, index: int) -> bool: ...
    def read_from(self, sources: Tensors) -> None:
        """An all-reduce of these reads what they contribute there, and leaves its result here."""

    def copy_to(self, other: Tensors, streaming: bool = False) -> None:
        """The host's memory only. Streaming, past the caches."""

def dtypes() -> list[str]:
    """The names of all dtypes; `Tensors.dtypes` has a bit for each, in this order."""

def fingerprints(tensors: Tensors) -> list[int]:
    """64 bits of each, equal where all bits are. In C order."""

def count_non_finite(tensors: Tensors) -> list[tuple[int, int]]:
    """How many elements of each are NaN, and how many infinite."""

def difference(mine: Tensors, theirs: Tensors) -> tuple[int, float, float]:
    """(elements whose bits differ, the largest difference, the largest element of `mine`)."""

class Segment:
    @staticmethod
    def create(n_bytes: int) -> Segment: ...
    @staticmethod
    def adopt(fd: int, n_bytes: int) -> Segment:
        """Memory of another library, as a file that has no name any more."""

    @staticmethod
    def open(pid: int, fd: int, n_bytes: int, token: int) -> Segment: ...
    def close_descriptor(self) -> None: ...
    def make_private(self) -> None:
        """For forked children: what they write is theirs alone."""

    def array(self, begin: int, n_bytes: int) -> NDArray[np.uint8]:
        """A part of it, which keeps it alive."""

    @property
    def fd(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def address(self) -> int: ...

class Wait:
    """What one thread of this rank waits for."""

    def report_if_due(self, what: str, arrived: Sequence[int], late: Sequence[int]) -> None:
        """To be called a few times a second. Raises StallError."""

    def close(self, went_well: bool) -> None: ...

class StallDetector:
    """Who waits for whom among the ranks of a host, and who is late."""

    def __init__(
        self,
        segment: Segment,
        offset: int,
        rank: int,
        hosts: Sequence[int],
        pids: Sequence[int],
        names: Sequence[str],
    ) -> None: ...
    @staticmethod
    def memory_bytes(size: int) -> int: ...
    @property
    def rank(self) -> int: ...
    def set_limits(self, warn_s: float, abort_s: float) -> None: ...
    @property
    def warn_s(self) -> float: ...
    @property
    def abort_s(self) -> float: ...
    def give_stacks(self, fd: int, signal: int) -> None: ...
    def announce(self, rank: int, what: str, expect_s: float) -> None: ...
    def doing(self, what: str) -> None: ...
    def wait(self) -> Wait: ...
    def lateness(self) -> list[tuple[int, float]]:
        """Of every rank: how often it came last, and how long each other waited on average."""

    def stall(self, reason: str) -> None:
        """All ranks of this host raise StallError, now or in their next call."""

    def check(self) -> None: ...
    @staticmethod
    def limit_thread(abort_s: float) -> float:
        """Limit how long this thread may wait (0: no limit of its own); return the former limit."""

class EngineGroup:
    """What an engine needs of a group of ranks."""

class ShmGroup(EngineGroup):
    """The ranks of one host, in shared memory."""

    def __init__(
        self,
        segment: Segment,
        offset: int,
        rank: int,
        size: int,
        pids: Sequence[int],
        names: Sequence[str],
    ) -> None: ...
    @staticmethod
    def memory_bytes(size: int) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def label(self) -> str: ...
    @property
    def slot_stores(self) -> str: ...
    def write_slots(self, how: str) -> None:
        """From now on: "auto", "cached" or "streaming"."""

    @property
    def stores(self) -> str:
        """How the next operation writes slots: "cached" or "streaming"."""

    @property
    def round_trip_ns(self) -> float:
        """Between this core and the next rank's, at the latest large operation; 0 before one."""

    def watched_by(self, detector: StallDetector, ranks: Sequence[int], direct: bool) -> None:
        """`ranks` are the numbers of the group's ranks in the world."""

    def agree(
        self, label: str, digest: int, count: int = 0, weight: float = 1.0
    ) -> list[tuple[int, int, float]]: ...
    def allreduce(
        self,
        tensors: Tensors,
        op: str,
        wire: str,
        prescale: float = 1.0,
        scale: float = 1.0,
        divisor: float = 1.0,
        weights: Sequence[float] = (),
    ) -> None: ...
    def reduce_in_place(
        self,
        tensors: Tensors,
        op: str,
        scale: float,
        divisor: float,
        distances: Sequence[int],
    ) -> None:
        """Tensors in memory that all ranks see, rank r's at distances[r] bytes from these."""

    def reduce_scatter(
        self,
        parts: list[Tensors],
        result: Tensors,
        op: str,
        wire: str,
        prescale: float = 1.0,
        scale: float = 1.0,
        divisor: float = 1.0,
        weights: Sequence[float] = (),
    ) -> None:
        """The reduction of parts[rank] in `result`; each part has the same sizes on all ranks."""

    def exchange(
        self,
        stream: list[Tensors],
        stream_bytes: Sequence[int],
        wanted: list[tuple[int, int, Tensors]],
    ) -> None: ...
    def check_peers(self, label: str, awaited: int = -1) -> None:
        """Raises PeerLostError if a peer has died or given up, or if `awaited` has left."""

    def has_left(self, rank: int) -> bool: ...
    def abandon(self, reason: str) -> None: ...
    def leave(self, reason: str) -> None: ...
    def peer_pids(self, silent: bool) -> list[int]: ...
    def claim_report(self) -> bool:
        """True for one rank of the host, the first that asks."""

    def peer_reports(self) -> bool:
        """Whether another rank has claimed the report, and lives."""

    def report_at_sigterm(self) -> None:
        """If SIGTERM ends this process while a peer has been killed, it reports which one.

        Where nobody handles SIGTERM; Python's own `signal.signal` replaces it.
        """

def weighting(op: str, weights: Sequence[float]) -> tuple[list[float], float]:
    """What multiplies each rank's contribution, if anything, and what divides the sum."""

def thread_group(size: int) -> list[ShmGroup]:
    """Ranks as threads of this process, for tests."""

class WireLayout:
    """Where a list of tensors lies on the wire, for transports that move bytes themselves."""

    def __init__(
        self, tensors: Tensors, op: str, wire: str, chunk_bytes: int, n_shares: int
    ) -> None: ...
    @staticmethod
    def of_parts(parts: list[Tensors], op: str, wire: str, chunk_bytes: int) -> WireLayout:
        """Each share is one of the parts."""

    @property
    def n_chunks(self) -> int: ...
    @property
    def largest_chunk(self) -> int: ...
    def shares(self, chunk: int) -> list[tuple[int, int]]: ...
    def encode(self, chunk: int, image: int) -> None: ...
    def reduce(
        self,
        chunk: int,
        share: int,
        images: Sequence[int],
        prescale: float,
        weights: Sequence[float],
        scale: float,
        divisor: float,
        image: int,
    ) -> None: ...
    def decode(self, chunk: int, image: int) -> None: ...

class Transfer:
    """What is under way to and from other hosts."""

    def __call__(self) -> bool:
        """Whether all of it is complete. Never waits; bytes may move only in these calls."""

class PointToPoint:
    """Messages between ranks of different hosts."""

    @staticmethod
    def calling(
        start: Callable[
            [Sequence[tuple[int, int, int, int]], Sequence[tuple[int, int, int, int]]],
            Callable[[], bool],
        ],
        largest_message: int | None = None,
    ) -> PointToPoint:
        """Over anything: `start(receive, send)` gets (peer, tag, address, n_bytes) of each message.

        What it returns tells whether all have been received and sent. Neither waits.
        """

class Carrier(PointToPoint):
    """What carries bytes between ranks of different hosts."""

    @staticmethod
    def made_of(
        start: Callable[
            [Sequence[tuple[int, int, int, int]], Sequence[tuple[int, int, int, int]]],
            Callable[[], bool],
        ],
        allgather: Callable[[int, int, int], Callable[[], bool]],
    ) -> Carrier:
        """Over anything.

        Args:
            start: As of `PointToPoint.calling`.
            allgather: Given (address, n_bytes, address), leaves every rank's bytes at the second
                address, in rank order; collective.
        """

class ControlChannel:
    """Short messages between ranks of different hosts."""

    @staticmethod
    def calling(channel: object) -> ControlChannel:
        """Over a `horo_lite.transports.hosts.carrier.Channel`."""

class MpiControlChannel(ControlChannel):
    """Over MPI, without the GIL."""

    def send(self, texts: Mapping[int, bytes], tag: int) -> None:
        """Send each of these peers a short message. Does not wait."""

    def receive(self) -> list[tuple[int, int, bytes]]:
        """Return those that have arrived: peer, tag, text.

        Raises:
            PeerLostError: A peer has died, and nothing has arrived.
        """

    def n_sent(self, peer: int) -> int:
        """How many messages that peer was sent."""

    def drained(self, n_sent: Sequence[int]) -> bool:
        """Take what has arrived.

        Whether nothing is under way any more, of which rank r has sent this one n_sent[r].
        """

class MpiPointToPoint(Carrier):
    """Over MPI, without the GIL."""

    @staticmethod
    def over(
        functions: Sequence[int],
        communicator: bytes,
        byte: bytes,
        any_source: int,
        any_tag: int,
        status_bytes: int,
        status_source: int,
        status_tag: int,
        largest_message: int | None = None,
    ) -> MpiPointToPoint:
        """Over the MPI whose functions and handles these are.

        Args:
            functions: The addresses of MPI_Isend, MPI_Irecv, MPI_Iallgather, MPI_Testall,
                MPI_Iprobe, MPI_Recv, MPI_Get_count, MPI_Finalized and MPI_Error_string.
            communicator: The handle as it lies in memory.
            byte: The same of MPI_BYTE.
            any_source: MPI_ANY_SOURCE.
            any_tag: MPI_ANY_TAG.
            status_bytes: sizeof(MPI_Status).
            status_source: Where in it MPI_SOURCE lies.
            status_tag: Where in it MPI_TAG lies.
            largest_message: Bytes; longer ones are sent in pieces.
        """

    def control_channel(self, tag: int | None = None) -> MpiControlChannel:
        """Return the communicator's short messages: those of that tag, or all that there are."""

    def start(
        self,
        receive: Sequence[tuple[int, int, int, int]],
        send: Sequence[tuple[int, int, int, int]],
        owner: object,
    ) -> Transfer:
        """Messages: (peer, tag, address, n_bytes) of each. `owner` keeps the memory."""

class HostsAllreduce:
    """The all-reduce among several hosts."""

    def __init__(
        self,
        group: ShmGroup,
        messages: PointToPoint,
        ranks: Sequence[Sequence[int]],
        here: int,
        memory: int,
    ) -> None:
        """`ranks[h]` are those of host h, as `messages` numbers them; `group`, of host `here`.

        `memory` is the address of what they share, zeroed or not.
        """

    @staticmethod
    def memory_bytes(ranks: Sequence[Sequence[int]], here: int, least_window: int = 0) -> int:
        """`least_window`: bytes of a window of what is exchanged, if others allow as much."""

    @property
    def window_bytes(self) -> int: ...
    @property
    def n_shares(self) -> int: ...
    def allreduce(
        self,
        layout: WireLayout,
        prescale: float,
        scale: float,
        divisor: float,
        weights: Sequence[float],
        label: str,
        on_idle: Callable[[], object],
    ) -> None:
        """In place over the layout's tensors; `weights` are those of this host's ranks.

        `on_idle` is called a few times a second while messages are awaited; raises to stop that.
        """

    def reduce_scatter(
        self,
        layout: WireLayout,
        prescale: float,
        scale: float,
        divisor: float,
        weights: Sequence[float],
        label: str,
        on_idle: Callable[[], object],
    ) -> None:
        """The same of a layout of parts: n_shares / hosts of each host, one for each rank."""

class HostsBroadcast:
    """The broadcast among several hosts."""

    def __init__(
        self,
        group: ShmGroup,
        messages: PointToPoint,
        ranks: Sequence[Sequence[int]],
        here: int,
        memory: int,
    ) -> None:
        """As of a HostsAllreduce, with as much memory."""

    def broadcast(self, tensors: Tensors, root: int, label: str) -> None:
        """Leave what the root's tensors hold in everyone's, which have as many bytes."""

class HostsGroup(EngineGroup):
    """The ranks of several hosts."""

    def __init__(
        self,
        host: ShmGroup,
        carrier: Carrier,
        control: ControlChannel,
        hosts: Sequence[Sequence[int]],
        here: int,
        least_window: int,
        memory: int,
        detector: StallDetector,
        ranks: Sequence[int],
        names: Sequence[str],
        direct: bool,
    ) -> None:
        """`hosts[h]` are the ranks of host h, as `carrier` numbers them; `host`, of host `here`.

        `memory` is the address of what the latter share for a HostsAllreduce. `ranks` are the
        world's numbers of all ranks, `names` what messages call them. `direct` are calls of the
        training thread.
        """

    def for_engine(self, wake_ups: ControlChannel) -> None:
        """Let an engine use it: to be called before `Engine.over`."""

    @property
    def label(self) -> str:
        """The operation that began last."""

    def agree(
        self, label: str, digest: int, count: int = 0, weight: float = 1.0
    ) -> list[tuple[int, int, float]]: ...
    def allreduce(
        self,
        tensors: Tensors,
        op: str,
        wire: str,
        prescale: float = 1.0,
        scale: float = 1.0,
        divisor: float = 1.0,
        weights: Sequence[float] = (),
    ) -> None: ...
    def reduce_scatter(
        self,
        parts: list[Tensors],
        result: Tensors,
        op: str,
        wire: str,
        prescale: float = 1.0,
        scale: float = 1.0,
        divisor: float = 1.0,
        weights: Sequence[float] = (),
    ) -> None:
        """The reduction of parts[rank] in `result`; each part has the same sizes on all ranks."""

    def broadcast(self, tensors: Tensors, root: int) -> None:
        """Leave what the root's tensors hold in everyone's, which have as many bytes."""

    def exchange_on_host(
        self,
        stream: list[Tensors],
        stream_bytes: Sequence[int],
        wanted: list[tuple[int, int, Tensors]],
    ) -> None:
        """As ShmGroup.exchange, among the ranks of this host."""

    def wait(self, transfer: Transfer | Callable[[], bool]) -> None:
        """Return when what the carrier has started is complete."""

    def check_peers(self, name: str, awaited: int = -1) -> None:
        """Raise PeerLostError if a peer has died or given up, or if `awaited` has left."""

    def has_left(self, rank: int, n_records: int) -> bool:
        """Whether that rank has left, having sent this one at most so many records of messages."""

    def count_record(self, peer: int) -> None:
        """Another record of messages was sent to that rank."""

    def announce(self, what: str, expect_s: float) -> None: ...
    def abandon(self, reason: str) -> None: ...
    def leave(self, reason: str) -> None: ...
    @property
    def given_up(self) -> bool: ...

class Job:
    """An operation in flight."""

    @property
    def name(self) -> str: ...
    @property
    def position(self) -> int:
        """All ranks know it by this number; 0: they do not know of it yet."""

    @property
    def times(self) -> tuple[int, int, int, bool]:
        """When it was submitted, all ranks had submitted it, and it was done (0: not yet), by
        CLOCK_MONOTONIC in ns; and whether it failed.
        """

    def done(self) -> bool: ...
    def begin_wait(self) -> None:
        """The stall detector counts this as waiting from now on; until wait() returns."""

    def withdraw(self, beside: bool = False) -> bool:
        """True where it was not run and never will be; False where it is done.

        Waits for no other rank's program. `beside` the training thread: asks for the GIL only once
        it is done.
        """

    def wait(self, beside: bool = False) -> None:
        """`beside` the training thread, which may go on meanwhile."""

    def record(self, channel: int, kind: int, names: int, tensors: Tensors | None) -> None:
        """The recorder follows it."""

    def value(self) -> object: ...

class Recorder:
    """The last operations of this process."""

    @staticmethod
    def memory_bytes(capacity: int) -> int: ...
    @staticmethod
    def use(memory: object, anew: bool = False) -> None:
        """From now on they are in this zeroed memory.

        Those so far are forgotten if all begin `anew` to count.
        """

    @staticmethod
    def n_operations() -> int:
        """Recorded so far."""

    @staticmethod
    def text(text: str) -> int:
        """The place of a text in the memory; 0 where it is full."""

    @staticmethod
    def time_phases(on: bool) -> None: ...
    @staticmethod
    def step() -> None:
        """An optimizer has made a step."""

    @staticmethod
    def enter(channel: int) -> None:
        """This thread makes a direct call."""

    @staticmethod
    def operation(
        label: str, kind: int = 0, names: int = 0, tensors: Tensors | None = None
    ) -> None:
        """What the direct call is; of kind 0 what its label begins with."""

    @staticmethod
    def begin() -> None:
        """All ranks have come to it."""

    @staticmethod
    def leave(failed: bool) -> None: ...

class Engine:
    """Runs asynchronous operations, matched by name across ranks."""

    @staticmethod
    def over(
        group: EngineGroup,
        direct: EngineGroup,
        ranks: Sequence[int],
        explain: Callable[[str, list[str], list[int]], str],
    ) -> Engine:
        """Over a group of the engines' own; `direct` is that of the same ranks' direct calls."""

    def watched_by(self, detector: StallDetector) -> None:
        """To be called at once, if at all."""

    @property
    def n_failed(self) -> int:
        """How often everything that lacked a match has failed."""

    @property
    def busy_s(self) -> float:
        """How long its thread has had a core, in seconds."""

    def drain(self) -> None: ...
    def submit_allreduce(
        self,
        group: EngineGroup,
        name: str,
        digest: int,
        tensors: Tensors,
        op: str,
        wire: str,
        prescale: float,
        scale: float,
        weight: float,
        describe: Callable[[], str],
        participation: Callable[[list[int]], tuple[float, bytes]],
        distances: Sequence[int] = (),
        changes: Tensors | None = None,
    ) -> Job:
        """With `distances`, as reduce_in_place.

        `changes`: the caller's memory that it changes, and that no other operation in flight may
        change.
        """

    def submit_call(
        self,
        name: str,
        digest: int,
        function: Callable[[list[float]], object],
        weight: float,
        describe: Callable[[], str],
        participation: Callable[[list[int]], tuple[float, bytes]],
        changes: Tensors | None = None,
    ) -> Job: ...
    def submit_join(self, stand_in: Callable[[bytes], object]) -> Job:
        """Until all ranks have, `stand_in(participation)` submits this rank's part.

        The value then orders the ranks by when they submitted this.
        """

def gpus() -> tuple[int, list[str], str]:
    """The driver's version (13000 is CUDA 13.0, 0 none), the GPUs by unique names, why none."""

def cuda_runtime_version() -> int:
    """Of the CUDA runtime that was built in; 0 where none was."""

class ReusedMemory:
    """Memory that is used again once no array refers to it.

    As much is kept as makes up for what was in use at one time, lately, and no more than
    `most_kept` bytes; none of small arrays.
    """

    def __init__(self, most_kept: int | None = None) -> None: ...
    def arrays(self, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Arrays of so many bytes each, aligned as XLA has it, with any contents."""

    def clear(self) -> None:
        """Free what no array refers to."""

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes that arrays refer to, and bytes that are kept for others."""

def xla_handler(
    run: Callable[[int, list[memoryview], list[memoryview]], str | None],
    version: tuple[int, int],
) -> object | None:
    """For an XLA of that version to be registered; None if that version is not known.

    It calls `run(call, arguments, results)` on threads of XLA's. Results hold what the first
    arguments hold, as many as the custom call's attribute `copies` says. What `run` returns is
    None, or what went wrong.
    """

def dlpack_capsule(
    address: int,
    shape: Sequence[int],
    dtype: str,
    index: int,
    owner: object,
    strides: Sequence[int] | None = None,
) -> object:
    """GPU memory for others to import; `owner` lives as long as they need it."""

class DeviceQueue:
    """A stream on one GPU, and its order with everybody else's."""

    def __init__(self, index: int) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def stream(self) -> int: ...
    def follow(self, producer: int) -> None:
        """What is queued here from now on comes after what the producer's stream was given."""

    def lead(self, consumer: int) -> None:
        """What the consumer's stream is given from now on comes after what is queued here."""

    def synchronize(self) -> None: ...
    def hold(self, object: object, stream: int | None = None) -> None:
        """Keeps it until what is queued here, or was given to that stream, is done."""

    def copy(self, source: Tensors, to: Tensors) -> None: ...

class Staging:
    """Pinned host memory that stands in for GPU tensors."""

    def __init__(self, queue: DeviceQueue) -> None: ...
    def download(self, tensors: Tensors, first: int, last: int) -> Tensors: ...
    def upload(self, host: Tensors, tensors: Tensors, first: int) -> None: ...

def nccl_library(candidates: Sequence[str]) -> tuple[str, int]:
    """Path and version (22105 is 2.21.5) of the NCCL that is used. DeviceError if there is none."""

def nccl_unique_id() -> bytes:
    """What rank 0 gives the others, so that they find each other."""

class NcclGroup:
    """The ranks of a world, each with a GPU of its own, and NCCL between them."""

    def __init__(
        self,
        queue: DeviceQueue,
        id: bytes,
        rank: int,
        size: int,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None: ...
    def split(self, color: int, rank: int, size: int) -> NcclGroup | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def can_use_windows(self) -> bool: ...
    @property
    def registered(self) -> str: ...
    def register_bucket(self, windows: bool) -> None: ...
    @staticmethod
    def can_reduce(
        tensors: Tensors, op: str, prescale: float, scale: float, divisor: float
    ) -> bool: ...
    def allreduce(
        self,
        tensors: Tensors,
        op: str,
        wire: str,
        prescale: float,
        scale: float,
        divisor: float,
        weight: float | None = None,
    ) -> None: ...
    def broadcast(self, tensors: Tensors, root: int) -> None: ...
    def allgather(self, send: Tensors, receive: list[Tensors]) -> None: ...
    def alltoall(self, send: list[Tensors], receive: list[Tensors]) -> None: ...
    def close(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def check(self) -> None: ...
