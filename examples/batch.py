"""Answers several prompts of different lengths at once, first without flash attention and then with it.

Run it: uv run examples/batch.py
"""

import mlxlm_flash_patch as flash
from flash_evals.work.models import DEMO_MODEL
from mlx_lm import batch_generate, load

# A folder or a hub id. This small model comes with flash_evals, so the example needs no network.
MODEL = str(DEMO_MODEL)
PROMPTS = [
    "The for statement is used to",
    "A class definition defines a class object. " * 20,
    "The expression list is evaluated once. " * 5,
]

model, tokenizer = load(MODEL)
prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
without = batch_generate(model, tokenizer, prompts, max_tokens=20).texts

# mlx-lm pads the prompts on the left to one length. Flash attention skips the padding.
with flash.enabled(strict=True):
    with_flash = batch_generate(model, tokenizer, prompts, max_tokens=20).texts

for prompt, text in zip(prompts, with_flash, strict=True):
    print(f"{len(prompt):3} tokens -> {text!r}")
print("the same texts without flash attention:", with_flash == without)
print(flash.status())  # the kernels that ran, and how often
