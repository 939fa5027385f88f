"""Training with PyTorch Ignite, whose `ignite.distributed` imports Horovod itself."""

import argparse

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from sklearn.datasets import load_digits


def training(local_rank, backend, batch_size, lr):
    assert idist.backend() == backend
    rank, size = idist.get_rank(), idist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # only the broadcast makes models alike
    digits = load_digits()
    x = torch.tensor(digits.data[:768] / 16, dtype=torch.float32)
    data = torch.utils.data.TensorDataset(x, torch.tensor(digits.target[:768]))
    loader = idist.auto_dataloader(data, batch_size=batch_size, shuffle=False)  # of all ranks
    layers = torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    model = idist.auto_model(torch.nn.Sequential(*layers))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5))
    criterion = torch.nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    metrics = {"accuracy": Accuracy(), "loss": Loss(criterion)}
    evaluator = create_supervised_evaluator(model, metrics)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        evaluator.run(loader)  # metrics over the data of all ranks
        if rank == 0:
            found = evaluator.state.metrics
            print(f"loss {found['loss']:.6f} accuracy {found['accuracy']:.6f}", flush=True)

    trainer.run(loader, max_epochs=2)
    total = sum(p.detach().double().abs().sum() for p in model.parameters()).item()
    assert idist.all_gather(str(total)) == [str(total)] * size
    ranks = torch.tensor([rank])
    assert idist.all_reduce(ranks, op="MAX").item() == size - 1
    assert idist.broadcast("root" if rank == size - 1 else "", src=size - 1) == "root"
    assert idist.all_gather(ranks, group=idist.new_group([size - 1])).numel() == 1
    idist.barrier()
    if rank == 0:
        print(f"ranks {size} weights {total!r}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawn", type=int)
    parser.add_argument("--backend", default="horovod")
    args = parser.parse_args()
    spawn = {"nproc_per_node": args.spawn} if args.spawn else {}
    with idist.Parallel(backend=args.backend, **spawn) as parallel:
        parallel.run(training, args.backend, batch_size=64, lr=0.08)
