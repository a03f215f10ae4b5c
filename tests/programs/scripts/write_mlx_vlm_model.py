"""Writes a small random Qwen2-VL and an image for mlx_vlm.generate: `python write_mlx_vlm_model.py FOLDER`.

Its tokens are the bytes, and those that stand for an image. So nothing comes from a hub.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm_models import TEXT, TOKENS, qwen2
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

folder = Path(sys.argv[1])
mx.random.seed(0)

vision = {"model_type": "qwen2_vl", "depth": 2, "embed_dim": 160, "hidden_size": 64, "num_heads": 2}
text = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
config = {"model_type": "qwen2_vl", **text, **TOKENS, "vision_config": {**vision, "patch_size": 14, "mlp_ratio": 2}}
(folder / "config.json").write_text(json.dumps(config))
mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(qwen2().parameters())), {"format": "mlx"})

alphabet = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
filler = [f"<|{number}|>" for number in range(256, 290)]  # so that the next ones have the numbers of TOKENS
images = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>"]
tokenizer.add_special_tokens([AddedToken(token) for token in (*filler, *images)])
tokenizer.save(str(folder / "tokenizer.json"))

template = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": template}
(folder / "tokenizer_config.json").write_text(json.dumps(names))
sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 30000}
(folder / "preprocessor_config.json").write_text(json.dumps(sizes))

pixels = np.random.default_rng(0).integers(0, 256, (112, 168, 3), np.uint8)
Image.fromarray(pixels).save(folder / "image.png")
