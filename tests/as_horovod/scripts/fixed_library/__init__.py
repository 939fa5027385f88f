"""A third-party library that looks for Horovod itself, late, and in several ways."""

import contextlib
import importlib
import importlib.util

import torch


def is_distributed():
    """As libraries look for optional packages: by name, and by a failing import."""
    if importlib.util.find_spec("horovod") is None:
        return False
    with contextlib.suppress(ImportError):
        importlib.import_module("horovod.torch")
        return True
    return False


class Trainer:
    def __init__(self, model, lr, accumulate=1, clip=None):
        self.model, self.lr, self.accumulate, self.clip = model, lr, accumulate, clip
        self.hvd = None
        if is_distributed():
            self.hvd = importlib.import_module("horovod.torch")
            try:
                self.hvd.rank()
            except ValueError:  # what Horovod raises before init()
                self.hvd.init()

    @property
    def rank(self):
        return 0 if self.hvd is None else self.hvd.rank()

    @property
    def size(self):
        return 1 if self.hvd is None else self.hvd.size()

    def fit(self, data, batch_size, epochs):
        """Train, and return the average loss of every epoch."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.5)
        sampler = torch.utils.data.distributed.DistributedSampler(
            data, num_replicas=self.size, rank=self.rank, shuffle=False
        )
        loader = torch.utils.data.DataLoader(
            data, batch_size // self.size // self.accumulate, sampler=sampler
        )
        with contextlib.ExitStack() as stack:
            if self.hvd is not None:
                from horovod.torch.optimizer import _DistributedOptimizer

                self.hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
                self.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
                named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
                optimizer = self.hvd.DistributedOptimizer(
                    optimizer, backward_passes_per_step=self.accumulate, named_parameters=named
                )
                assert isinstance(optimizer, (_DistributedOptimizer, torch.optim.SGD))
                # Gradients are synchronized by hand, so that they can be clipped.
                stack.enter_context(optimizer.skip_synchronize())
            return [self._epoch(loader, optimizer) for _ in range(epochs)]

    def _epoch(self, loader, optimizer):
        losses = []
        for i, (x, y) in enumerate(loader):
            if i % self.accumulate == 0:
                optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            losses.append(loss.detach())
            (loss / self.accumulate).backward()
            if i % self.accumulate == self.accumulate - 1:
                if self.hvd is not None:
                    optimizer.synchronize()
                if self.clip is not None:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
                optimizer.step()
        return self.average(torch.stack(losses).mean()).item()

    def average(self, value):
        if self.hvd is None:
            return value
        self.hvd.join()
        return self.hvd.allreduce(value, op=self.hvd.mpi_ops.Average, name="average")
