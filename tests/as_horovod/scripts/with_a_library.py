"""A script that does not mention Horovod: the library that it uses does."""

import fixed_library
import torch
from digits import load_digits

torch.set_num_threads(1)
images, labels, *_ = load_digits(None)
x = torch.tensor(images[:768]).flatten(1)
data = torch.utils.data.TensorDataset(x, torch.tensor(labels[:768]))
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
trainer = fixed_library.Trainer(model, lr=0.08, accumulate=2, clip=0.5)
assert trainer.hvd is not None
torch.manual_seed(trainer.rank)  # so that only the broadcast makes models alike
for layer in (model[0], model[2]):
    layer.reset_parameters()
for epoch, loss in enumerate(trainer.fit(data, batch_size=64, epochs=2)):
    if trainer.rank == 0:
        print(f"epoch {epoch}: loss {loss:.6f}", flush=True)
total = sum(p.detach().double().abs().sum() for p in model.parameters())
assert trainer.average(total).item() == total.item()
if trainer.rank == 0:
    print(f"ranks {trainer.size} weights {total.item():.6f}", flush=True)
