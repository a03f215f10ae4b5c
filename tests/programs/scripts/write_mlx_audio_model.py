"""Writes a small random Qwen3-ASR and two seconds of noise for mlx_audio.stt.generate: `python FILE FOLDER`."""

import json
import sys
import wave
from pathlib import Path

import mlx.core as mx
import numpy as np
from byte_tokenizer import write_tokenizer
from mlx.utils import tree_flatten
from mlx_audio_models import CONFIG, asr

folder = Path(sys.argv[1])
mx.random.seed(0)
mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(asr().parameters())), {"format": "mlx"})
(folder / "config.json").write_text(json.dumps(CONFIG))
write_tokenizer(folder, ["<|audio_pad|>", "<|audio_start|>", "<|audio_end|>", "<|im_start|>", "<|im_end|>"])
(folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 80, "sampling_rate": 16000}))

with wave.open(str(folder / "noise.wav"), "wb") as file:
    file.setparams((1, 2, 16000, 0, "NONE", None))
    file.writeframes(np.random.default_rng(0).integers(-8000, 8000, 32000, np.int16).tobytes())
