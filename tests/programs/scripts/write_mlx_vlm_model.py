"""Writes a small random Qwen2-VL and an image for mlx_vlm.generate: `python FILE FOLDER`."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_vlm_models import QWEN2, QWEN2_VISION, qwen2
from PIL import Image
from small_model import write_model

folder = Path(sys.argv[1])
mx.random.seed(0)
config = {"model_type": "qwen2_vl", **QWEN2, "vision_config": QWEN2_VISION}
sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 30000}
special_tokens = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]

template = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
write_model(folder, qwen2(), config, sizes, special_tokens, template)

pixels = np.random.default_rng(0).integers(0, 256, (112, 168, 3), np.uint8)
Image.fromarray(pixels).save(folder / "image.png")
