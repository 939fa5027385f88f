"""The ranks of test_bucket_views.py."""

import copy
import gc
import io
import os
import pickle

import torch

import horo_lite.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.manual_seed(0)


def make():
    net = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Tanh(), torch.nn.Linear(400, 7))
    net.load_state_dict(state)
    return net


state = torch.nn.Sequential(
    torch.nn.Linear(300, 400), torch.nn.Tanh(), torch.nn.Linear(400, 7)
).state_dict()
hvd.broadcast_parameters(state)


def kib(address):
    # Returns this process's share of the pages written at `address` and of mappings of that size.
    found, mine = {}, None
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if "-" in first:
                begin, end = (int(number, 16) for number in first.split("-"))
                is_ours = "memfd:horo_lite" in rest
                mine = end - begin if begin <= address < end else mine
            elif is_ours and first == "Pss:":
                found[end - begin] = found.get(end - begin, 0) + int(rest.split()[0])
    return found[mine]


def step(net, optimizer, number):
    optimizer.zero_grad()
    x = torch.randn(6, 300, generator=torch.Generator().manual_seed(number))
    net(x[rank::size]).pow(2).mean().backward()
    optimizer.step()


for _ in range(2):
    nets = make(), make()
    wrapped = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            net.named_parameters(),
            gradient_as_bucket_view=net is nets[0],
        )
        for net in nets
    ]
    for number in range(3):
        for net, optimizer in zip(nets, wrapped, strict=True):
            step(net, optimizer, number)
    hvd.barrier()
    n_kib = size * sum(p.nbytes for p in nets[0].parameters()) / 1024
    found = sum(hvd.allgather_object(kib(nets[0][0].weight.grad.data_ptr())))
    assert n_kib - 16 <= found <= n_kib + 32, (n_kib, found)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, q.grad)

    # A forked child's computations do not change any gradients of its parent.
    kept = [p.grad.clone() for p in nets[0].parameters()]
    child = os.fork()
    if child == 0:
        nets[0](torch.ones(2, 300)).sum().backward()
        for p, g in zip(nets[0].parameters(), kept, strict=True):
            assert not torch.equal(p.grad, g)
            p.grad.zero_()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hvd.barrier()
    assert all(torch.equal(p.grad, g) for p, g in zip(nets[0].parameters(), kept, strict=True))

    # Copies share memory with each other.
    both = nets[0], wrapped[0]
    for again in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        step(*again, 3)
    step(nets[0], wrapped[0], 3)
    assert all(
        torch.equal(p, q) for p, q in zip(nets[0].parameters(), again[0].parameters(), strict=True)
    )
    file = io.BytesIO()
    torch.save(nets[0][2].bias.grad, file)
    assert len(file.getvalue()) < 10_000

    hvd.shutdown()
    gradient = nets[0][0].weight.grad
    assert gradient.abs().sum() > 0  # it outlives the world
    del nets, net, wrapped, optimizer, both, again, p, q, gradient
    gc.collect()
    hvd.init()

# A process set, and one of its optimizers beside other ranks' optimizers.
some = hvd.add_process_set([0, 2])
net = make()
one = hvd.DistributedOptimizer(
    torch.optim.SGD(net[0].parameters(), lr=0.1), process_set=some, gradient_as_bucket_view=True
)
all_ = hvd.DistributedOptimizer(
    torch.optim.SGD(net[2].parameters(), lr=0.1), gradient_as_bucket_view=True
)
for _ in range(3):
    one.zero_grad(), all_.zero_grad()
    net(torch.full((2, 300), 0.01 * (1 + rank))).pow(2).mean().backward()
    found = hvd.allgather_object([p.grad.tolist() for p in net.parameters()])
    assert found[0][:2] == found[2][:2] != found[1][:2]
    assert found[0][2:] == found[1][2:] == found[2][2:]
    one.step(), all_.step()
assert (one._exchange.reducer.shared if rank != 1 else None) != all_._exchange.reducer.shared
print(f"rank {rank}: shared {all_._exchange.reducer.shared is not None}", flush=True)
