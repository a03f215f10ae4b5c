"""Writes a small Qwen2 to a folder in mlx-lm's layout: configuration, random weights and tokenizer."""

import json

import mlx.core as mx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.patch.model_configs import random_model

END = "<|endoftext|>"


def write_model(folder, config, dtype=mx.float32, text="", bos=False):
    """Writes the model and its byte-level BPE tokenizer. The tokens are an end-of-text token, the 256 bytes, and pairs
    that are frequent in `text`, up to 320 in all. With `bos`, the tokenizer puts a BOS token before each text.
    """
    random_model("qwen2", config, dtype).save_weights(str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    if bos:
        end = (END, tokenizer.token_to_id(END))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[end])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END if bos else None}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
