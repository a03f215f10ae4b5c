"""mlx-vlm: vision language models. Their vision towers have no mask, and heads of 64, 72 and 80 elements."""

import importlib

import mlx.core as mx
from arm import main
from mlx_vlm.generate import generate_step

IMAGE = 290  # the id of the placeholder token for a piece of an image
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 300,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}
QWEN2 = {**TEXT, **TOKENS, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
QWEN2_VISION = {"model_type": "qwen2_vl", "depth": 2, "embed_dim": 160, "hidden_size": 64, "num_heads": 2}
QWEN2_VISION |= {"patch_size": 14, "mlp_ratio": 2}


def build(name, text, vision, **config):
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    made = module.ModelConfig.from_dict({"model_type": name, **config, "text_config": text, "vision_config": vision})
    if isinstance(made.text_config, dict):
        made.text_config = module.TextConfig.from_dict(made.text_config)
    if isinstance(made.vision_config, dict):
        made.vision_config = module.VisionConfig.from_dict(made.vision_config)
    model = module.Model(made)
    model.eval()
    return model


def qwen2(vision=QWEN2_VISION, **text):
    return build("qwen2_vl", {**QWEN2, **text}, vision, **{**QWEN2, **text})


def patches(number):
    return mx.random.normal((number, 3 * 2 * 14 * 14))


def qwen2_vl():
    """The prompt has two images of different sizes. In the vision tower, whose heads have 80 elements, an image attends
    only to itself.
    """
    model, pixels = qwen2(), patches(96 + 36)
    tokens = mx.array([[5] * 4 + [292] + [IMAGE] * 24 + [7, 292] + [IMAGE] * 9 + [8] * 6])
    grid = mx.array([[1, 8, 12], [1, 6, 6]])
    return lambda: model(tokens, pixel_values=pixels, image_grid_thw=grid, mask=mx.ones_like(tokens)).logits


def qwen2_vl_generates():
    """The log-probabilities of twelve tokens after an image, from mlx-vlm's own loop and rotating caches."""
    rotation = {"type": "mrope", "mrope_section": [4, 6, 6]}
    model, pixels = qwen2(num_attention_heads=2, num_key_value_heads=1, rope_scaling=rotation), patches(96)
    tokens = mx.array([[5] * 4 + [292] + [IMAGE] * 24 + [7] * 6])
    how = {"image_grid_thw": mx.array([[1, 8, 12]]), "max_tokens": 12, "temperature": 0.0, "max_kv_size": 16}

    def run():
        steps = generate_step(tokens, model, pixels, mx.ones_like(tokens), **how)
        return [logprobs for _, (_, logprobs) in zip(range(12), steps, strict=False)]

    return run


def vision_tower():
    """One layer for 2,048 patches, with 16 heads of 72 elements, as in large models."""
    large = {"depth": 1, "embed_dim": 1152, "num_heads": 16, "mlp_ratio": 0.25, "spatial_merge_size": 1}
    tower, pixels = qwen2({**QWEN2_VISION, **large}).vision_tower, patches(2048)
    mx.eval(tower.parameters(), pixels)
    return lambda: tower(pixels, mx.array([[1, 32, 64]]))


def gemma3():
    """The model has SigLIP's tower, with heads of 72 elements, and a Gemma 3. Some layers have a window of 8 tokens."""
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 144, "intermediate_size": 96}
    vision |= {"num_attention_heads": 2, "patch_size": 14, "image_size": 112}
    text = {**TEXT, "model_type": "gemma3_text", "num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 16}
    text |= {"mm_tokens_per_image": 4, "sliding_window": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16}
    sizes = {"vocab_size": 300, "hidden_size": 64, "pad_token_id": 0, "mm_tokens_per_image": 4}
    model = build("gemma3", text, vision, image_token_index=IMAGE, **sizes)
    # Replaces the projector's weights. They are initially all 1, and turn vectors of mean zero into rounding errors,
    # which the norm would enlarge.
    projector = model.multi_modal_projector
    projector.mm_input_projection_weight = mx.random.normal(projector.mm_input_projection_weight.shape) * 0.1
    pixels = mx.random.normal((1, 3, 112, 112))
    tokens = mx.array([[2, 5, 6] + [IMAGE] * 4 + list(range(20, 50))])
    return lambda: model(tokens, pixel_values=pixels, mask=mx.ones_like(tokens)).logits


if __name__ == "__main__":
    main(qwen2_vl, qwen2_vl_generates, vision_tower, gemma3)
