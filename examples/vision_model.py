"""Runs a vision model of mlx-vlm with flash attention: a small Qwen2-VL with random weights, on a random image.

Run it: uv run examples/vision_model.py
"""

import sys

import mlx.core as mx
import mlxlm_flash_patch as flash

try:
    from mlx_vlm.models import qwen2_vl
except ImportError:
    print("skipped: this example needs mlx-vlm (pip install mlx-vlm)")
    sys.exit()

IMAGE = 290  # the token that stands for four patches of an image
TOKENS = {"image_token_id": IMAGE, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}
TEXT = {"model_type": "qwen2_vl", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 300}
TEXT |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
VISION = {"model_type": "qwen2_vl", "depth": 2, "embed_dim": 160, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}

# In your program, mlx_vlm.load() gives a real model instead. The lines after it stay the same.
mx.random.seed(0)
config = qwen2_vl.ModelConfig.from_dict({**TEXT, **TOKENS, "text_config": TEXT, "vision_config": VISION})
config.text_config = qwen2_vl.TextConfig.from_dict({**TEXT, **TOKENS})
config.vision_config = qwen2_vl.VisionConfig.from_dict(VISION)
model = qwen2_vl.Model(config)
model.eval()

pixels = mx.random.normal((16 * 24, 3 * 2 * 14 * 14))  # 16 x 24 patches of two frames of 14 x 14 pixels
prompt = mx.array([[5, 6, 292] + [IMAGE] * (16 * 24 // 4) + [293, 7, 8, 9]])


def logits():
    inputs = {"pixel_values": pixels, "image_grid_thw": mx.array([[1, 16, 24]]), "mask": mx.ones_like(prompt)}
    return model(prompt, **inputs).logits


without = logits()
mx.eval(without)  # MLX is lazy: this computes `without` before the patch is on
with flash.enabled(strict=True):  # an error if a call falls back, or if flash attention never runs
    with_flash = logits()
    mx.eval(with_flash)
    print(flash.status())  # the calls of the vision tower and of the language model

print(f"largest difference of two logits: {(with_flash - without).abs().max().item():.1e}")
