"""parakeet-mlx: a Conformer, whose positional bias has the shape [heads, queries, keys]."""

import mlx.core as mx
from arm import main
from mlx.utils import tree_map
from parakeet_mlx.conformer import Conformer, ConformerArgs

SIZES = {
    "feat_in": 80,
    "d_model": 128,
    "n_layers": 2,
    "n_heads": 4,
    "ff_expansion_factor": 2,
    "subsampling_factor": 8,
    "subsampling": "dw_striding",
    "subsampling_conv_channels": 16,
    "conv_kernel_size": 9,
    "pos_emb_max_len": 2000,
}


def encode(attention, frames):
    """Encodes two recordings of this many frames."""
    model = Conformer(ConformerArgs(**SIZES, self_attention_model=attention))
    # Random numbers are added to all parameters, because positional biases are initially zero.
    model.update(tree_map(lambda x: x + 0.1 * mx.random.normal(x.shape), model.parameters()))
    model.eval()
    sound = mx.random.normal((2, frames, 80))
    mx.eval(model.parameters(), sound)
    return lambda: model(sound)[0]


def relative_positions():
    return encode("rel_pos", 400)


def two_minutes():
    """Encodes 12,000 frames, to measure memory. Subsampling turns them into 1,500."""
    return encode("rel_pos", 12_000)


def plain():
    return encode("normal", 400)


if __name__ == "__main__":
    main(relative_positions, two_minutes, plain)
