"""A program that runs a model of the given type with the patch. If there are several ranks, they divide the heads.

Each rank prints its tokens, each token's lead (its logprob minus the second largest), and the calls of each kernel.
"""

import json
import sys

import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.generate import generate_step

from tests.patch.model_configs import config, random_model

STEPS = 48

mx.disable_compile()
group = mx.distributed.init()
model = random_model(sys.argv[1], {**config(sys.argv[1]), "hidden_size": 512, "head_dim": 128})
if group.size() > 1:
    model.shard(group)
prompt = mx.arange(300) * 7 % 97
with flash.enabled(strict=True):
    tokens, leads = [], []
    for token, logprobs in generate_step(prompt, model, max_tokens=STEPS):
        second, first = mx.sort(logprobs)[-2:].tolist()
        tokens.append(int(token))
        leads.append(first - second)
mx.synchronize()
status, heads = flash.status(), model.layers[0].self_attn.n_heads
found = {"tokens": tokens, "leads": leads, "calls": status.calls, "fallbacks": status.fallbacks, "heads": heads}
print(json.dumps({"rank": group.rank(), "size": group.size(), **found}))
