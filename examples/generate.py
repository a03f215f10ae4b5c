"""Generates text with mlx-lm, first without flash attention and then with it, and prints which kernels ran.

Run it: uv run examples/generate.py
"""

import mlxlm_flash_patch as flash
from flash_evals.work.models import DEMO_MODEL
from mlx_lm import generate, load

# A folder or a hub id. This small model comes with flash_evals, so the example needs no network.
MODEL = str(DEMO_MODEL)
PROMPT = "The for statement is used to iterate over the elements of a sequence. " * 8

model, tokenizer = load(MODEL)
without = generate(model, tokenizer, PROMPT, max_tokens=40)

# From here on mlx-lm uses flash attention, for this model and every other one. Nothing else changes.
# With strict=True, a call that would fall back to mlx-lm's own attention raises an error.
flash.enable(strict=True)
with_flash = generate(model, tokenizer, PROMPT, max_tokens=40)

print(with_flash.strip())
print()
print("the same text without flash attention:", with_flash == without)
print(flash.status())  # the kernels that ran, and how often

# To switch it on for a part of a program: `with flash.enabled(): ...`. To switch it off:
flash.disable()
