"""A program that runs a model without and with the patch, and prints both runs' tokens and the patch's warnings.

Tests set the variable FLASHATTN_PLANT, which plants a fault in the kernels.
"""

import json
import warnings

import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.generate import generate_step

from tests.patch.model_configs import config, random_model

mx.disable_compile()
model = random_model("qwen2", {**config("qwen2"), "hidden_size": 256}, mx.float16)
prompt = mx.arange(100) % 97


def tokens():
    return [int(token) for token, _ in generate_step(prompt, model, max_tokens=8)]


off = tokens()
with warnings.catch_warnings(record=True) as caught, flash.enabled():
    warnings.simplefilter("always")
    on = tokens()
status = flash.status()
said = [f"{said.category.__name__}: {said.message}" for said in caught]
left = sum(status.fallbacks.values()) + sum(status.left.values())
print(json.dumps({"off": off, "on": on, "said": said, "calls": status.calls, "left": left}))
