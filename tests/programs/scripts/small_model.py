"""Writes a folder with a small random model. Its tokens are bytes, so it needs no tokenizer from a hub."""

import json

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FIRST = 290  # the id of the first special token; ids between the bytes and FIRST are unused
END = "<|endoftext|>"


def write_model(folder, model, config, preprocessor, special_tokens, chat_template=None):
    """Writes the model's weights, configurations and tokenizer. END has the highest token id."""
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    alphabet = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    nothing = [f"<|{number}|>" for number in range(len(alphabet), FIRST)]
    tokenizer.add_special_tokens([*nothing, *special_tokens, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    of_tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokens))
