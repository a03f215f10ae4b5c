"""Trains LoRA adapters on a long sequence, without and with flash attention, and prints loss, time and memory.

Run it: uv run examples/lora_long_context.py
"""

import time

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlxlm_flash_patch as flash
from flash_evals.work.measure import peak_memory
from flash_evals.work.models import DEMO_MODEL
from mlx_lm import load
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers

# Without flash attention, the memory of a step grows with the square of the length. With it, memory grows linearly.
LENGTH, STEPS = 1024, 2


def train() -> None:
    mx.random.seed(0)
    model, tokenizer = load(str(DEMO_MODEL))
    model.freeze()
    linear_to_lora_layers(model, num_layers=4, config={"rank": 8, "scale": 20.0, "dropout": 0.0})
    model.train()

    text = "A class definition is an executable statement that binds a name to a class object. " * 200
    batch = mx.array([tokenizer.encode(text)[: LENGTH + 1]])
    first_and_last = mx.array([[0, LENGTH]])  # range of the tokens whose loss counts

    optimizer = optim.Adam(learning_rate=1e-4)
    loss_and_gradient = nn.value_and_grad(model, default_loss)
    for step in range(STEPS):
        start = time.perf_counter()
        with peak_memory() as peak:
            (loss, _), gradient = loss_and_gradient(model, batch, first_and_last)
            optimizer.update(model, gradient)
            mx.eval(model.parameters(), optimizer.state, loss)
            megabytes = peak() / 1e6
        seconds = time.perf_counter() - start
        print(f"  step {step}: loss {loss.item():.4f}, {seconds:.2f} s, {megabytes:.0f} MB above the model")


print(f"without flash attention, {LENGTH:,} tokens")
train()

print(f"with flash attention, {LENGTH:,} tokens")
with flash.enabled(strict=True):
    train()
