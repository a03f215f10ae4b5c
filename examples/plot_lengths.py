"""Plots time and memory of reading a prompt against its length, without and with flash attention.

Run it: uv run examples/plot_lengths.py [FILE.png]
"""

import sys
import time
from contextlib import nullcontext

import matplotlib.pyplot as plt
import mlx.core as mx
import mlxlm_flash_patch as flash
from flash_evals.work.measure import peak_memory
from flash_evals.work.models import DEMO_MODEL
from mlx_lm import load

FILE = sys.argv[1] if len(sys.argv) > 1 else "lengths.png"
LENGTHS = [256, 512, 1024, 2048]

model, tokenizer = load(str(DEMO_MODEL))
tokens = mx.random.randint(0, 1000, (1, max(LENGTHS)))


def measure(length: int) -> tuple[float, float]:
    """Seconds and megabytes for one prompt, in one trial. `flash-eval speed` repeats trials and is more accurate."""
    with peak_memory() as peak:
        start = time.perf_counter()
        mx.eval(model(tokens[:, :length]))
        return time.perf_counter() - start, peak() / 1e6


plt.switch_backend("agg")  # writes files, needs no display
figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for name, patch, look in (("off", nullcontext, "s-C1"), ("on", flash.enabled, "o-C0")):
    with patch():
        measure(LENGTHS[0])  # warms up: the first call is slower
        seconds, megabytes = zip(*map(measure, LENGTHS), strict=True)
    time_axes.plot(LENGTHS, seconds, look, label=f"flash attention {name}")
    memory_axes.plot(LENGTHS, megabytes, look, label=f"flash attention {name}")
    print(
        f"flash attention {name}, {LENGTHS[-1]:,} tokens: {seconds[-1]:.2f} s, {megabytes[-1]:.0f} MB above the model"
    )

time_axes.set(title="Reading a prompt", xlabel="tokens", ylabel="seconds")
memory_axes.set(title="Peak memory above the model", xlabel="tokens", ylabel="megabytes")
for axes in (time_axes, memory_axes):
    axes.set_xticks(LENGTHS)
    axes.set_ylim(0)
    axes.legend()
figure.savefig(FILE, dpi=144)
print("wrote", FILE)
