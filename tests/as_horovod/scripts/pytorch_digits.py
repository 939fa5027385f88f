"""Training as Horovod's documentation shows it for PyTorch; it does not mention horo_lite."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812
from digits import load_digits
from horovod.common.exceptions import HorovodInternalError
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
args = parser.parse_args()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 8, 3)
        self.hidden = torch.nn.Linear(8 * 6 * 6, 32)
        self.out = torch.nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv(x)).flatten(1)
        return self.out(F.relu(self.hidden(x)))


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), 0

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def main():
    hvd.init()
    torch.manual_seed(42 + hvd.rank())  # so that only the broadcast makes models alike
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    torch.set_num_threads(1)
    images, labels, *_ = load_digits(None)
    x = torch.tensor(images[:768]).permute(0, 3, 1, 2)
    data = TensorDataset(x, torch.tensor(labels[:768]))
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    passes = args.batches_per_allreduce
    loader = DataLoader(data, batch_size=args.batch_size * passes, sampler=sampler)

    model = Net()
    lr_scaler = passes * hvd.size() if not args.use_adasum else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=passes,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    resume_from = hvd.broadcast(torch.tensor(0), root_rank=0, name="resume_from_epoch").item()

    for epoch in range(resume_from, args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        loss_of_epoch = Metric("train_loss")
        for x, y in loader:
            optimizer.zero_grad()
            for i in range(0, len(x), args.batch_size):
                part, target = x[i : i + args.batch_size], y[i : i + args.batch_size]
                loss = F.cross_entropy(model(part), target)
                loss_of_epoch.update(loss)
                loss.div_(passes).backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss_of_epoch.avg.item():.6f}", flush=True)

    total = sum(p.detach().double().abs().sum() for p in model.parameters())
    everyone = hvd.allgather_object(total.item())
    assert len(set(everyone)) == 1, everyone
    if hvd.rank() == 0:
        print(f"ranks {hvd.size()} weights {total.item():.6f}", flush=True)


try:
    main()
except HorovodInternalError as error:
    raise SystemExit(f"a rank was lost: {error}") from error
