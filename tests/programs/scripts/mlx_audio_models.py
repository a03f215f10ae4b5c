"""mlx-audio: speech recognition by an audio encoder and a Qwen3, and by Whisper.

Whisper computes attention by matrix products and softmax, without MLX's attention function.
"""

import mlx.core as mx
from arm import main
from mlx_audio.stt.models.qwen3_asr import qwen3_asr as recogniser
from mlx_audio.stt.models.qwen3_asr.config import ModelConfig
from mlx_audio.stt.models.whisper import whisper as whispers

AUDIO = 290  # the id of the placeholder token for a piece of sound


ENCODER = {"num_mel_bins": 80, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 96}
ENCODER |= {"d_model": 128, "output_dim": 64, "downsample_hidden_size": 16, "n_window": 50, "n_window_infer": 100}
TEXT = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CONFIG = {"model_type": "qwen3_asr", "audio_config": ENCODER, "text_config": TEXT, "audio_token_id": AUDIO}


def asr():
    model = recogniser.Qwen3ASRModel(ModelConfig.from_dict(CONFIG))
    model.eval()
    return model


def qwen3_asr():
    """The input is three seconds of sound, then three tokens. In the encoder, an additive mask separates pieces of the
    sound.
    """
    model, sound = asr(), mx.random.normal((1, 80, 300))
    prompt = mx.array([[5, 6] + [AUDIO] * 39 + [7, 8]])

    def run():
        cache = model.make_cache()
        outputs = [model(prompt, input_features=sound, cache=cache)]
        return outputs + [model(mx.array([[token]]), cache=cache) for token in (20, 21, 22)]

    return run


def whisper_writes_attention_out():
    sizes = {"n_mels": 80, "n_audio_ctx": 60, "n_audio_state": 64, "n_audio_head": 4, "n_audio_layer": 2}
    sizes |= {"n_vocab": 200, "n_text_ctx": 32, "n_text_state": 64, "n_text_head": 4, "n_text_layer": 2}
    model = whispers.Model(whispers.ModelDimensions(**sizes), dtype=mx.float32)
    model.eval()
    sound, tokens = mx.random.normal((1, 120, 80)), mx.array([[1, 2, 3, 4]])
    return lambda: model(sound, tokens)


if __name__ == "__main__":
    main(qwen3_asr, whisper_writes_attention_out)
