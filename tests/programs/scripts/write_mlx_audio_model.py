"""Writes a small random Qwen3-ASR and two seconds of noise for mlx_audio.stt.generate: `python FILE FOLDER`."""

import sys
import wave
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_audio_models import CONFIG, asr
from small_model import write_model

folder = Path(sys.argv[1])
mx.random.seed(0)
special_tokens = ["<|audio_pad|>", "<|audio_start|>", "<|audio_end|>", "<|im_start|>", "<|im_end|>"]
write_model(folder, asr(), CONFIG, {"feature_size": 80, "sampling_rate": 16000}, special_tokens)

with wave.open(str(folder / "noise.wav"), "wb") as file:
    file.setparams((1, 2, 16000, 0, "NONE", None))
    file.writeframes(np.random.default_rng(0).integers(-8000, 8000, 32000, np.int16).tobytes())
