"""Train a tiny language model with Hugging Face's Trainer, by torchrun or as one process.

Arguments: the backend, or "alone"; and the file for the result.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import horo_lite.torch  # noqa: F401 (registers the backend, also where the package is not installed)

backend, result = sys.argv[1], Path(sys.argv[2])
alone = backend == "alone"
if not alone:
    # Before TrainingArguments, whose ddp_backend= only accepts backends of its own list.
    dist.init_process_group(backend)
torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
sizes = {"vocab_size": 31, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout))
texts = (torch.arange(64)[:, None] * 5 + torch.arange(8) * 3) % 31
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=8 if alone else 4,
        num_train_epochs=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=5,
    )
    assert arguments.world_size == (1 if alone else 2)
    assert alone or dist.get_backend() == backend
    samples = [{"input_ids": text, "labels": text} for text in texts]
    trainer = Trainer(model=model, args=arguments, train_dataset=samples)
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert len(losses) == 16, losses
rank = 0 if alone else dist.get_rank()
torch.save({"model": model.state_dict(), "losses": losses}, f"{result}.{rank}")
