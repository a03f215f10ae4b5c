"""mflux: transformers and decoders for images. Their modules import MLX's attention function by name."""

import mlx.core as mx
from arm import main
from mflux.models.common.config.model_config import ModelConfig
from mflux.models.flux2.model.flux2_transformer import Flux2Transformer
from mflux.models.flux2.model.flux2_vae.common.attention import Flux2AttentionBlock
from mflux.models.flux2.model.flux2_vae.decoder.decoder import Flux2Decoder
from mflux.models.z_image.model.z_image_transformer.transformer import ZImageTransformer

ModelConfig.precision = mx.float32  # not bfloat16, because its rounding would hide differences


def z_image():
    """The input is a latent of 16 x 16 and a caption of 20 tokens. Heads have 32 elements."""
    sizes = {"dim": 128, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "cap_feat_dim": 64}
    model = ZImageTransformer(in_channels=4, axes_dims=[8, 12, 12], axes_lens=[64, 64, 64], **sizes)
    latent, caption = mx.random.normal((4, 1, 16, 16)), mx.random.normal((20, 64))
    return lambda: model(latent, timestep=0.5, sigmas=mx.array([1.0, 0.5]), cap_feats=caption)


def flux2():
    """The input is 64 patches and 12 text tokens. Two blocks have two streams, two have one. Heads have 32 elements."""
    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4}
    model = Flux2Transformer(in_channels=16, joint_attention_dim=48, axes_dims_rope=(8, 8, 8, 8), **sizes)
    patches, text = mx.random.normal((1, 64, 16)), mx.random.normal((1, 12, 48))
    places = mx.array([[0, row, column, 0] for row in range(8) for column in range(8)])
    words = mx.array([[0, 0, 0, number] for number in range(12)])
    return lambda: model(patches, text, 0.5, img_ids=places, txt_ids=words)


def flux2_vae():
    """The decoder for a latent of 16 x 16. It has one head of 64 elements, and passes the scale to MLX as an array."""
    decoder = Flux2Decoder(in_channels=8, block_out_channels=(32, 64), layers_per_block=1)
    latent = mx.random.normal((1, 8, 16, 16))
    return lambda: decoder(latent)


def vae_attention():
    """The decoder's attention in full size: 48 x 48 positions, one head of 512 elements."""
    block, places = Flux2AttentionBlock(512), mx.random.normal((1, 512, 48, 48))
    mx.eval(block.parameters(), places)
    return lambda: block(places)


if __name__ == "__main__":
    main(z_image, flux2, flux2_vae, vae_attention)
