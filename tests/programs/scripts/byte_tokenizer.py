"""Writes a tokenizer of the bytes and a few special tokens, so that a small model needs nothing from a hub."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FIRST = 290  # the id of the first special token; ids between the bytes and it are unused
END = "<|endoftext|>"


def write_tokenizer(folder, special_tokens, chat_template=None):
    """Writes the tokenizer to the folder. Its last token is the end of a text."""
    alphabet = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    nothing = [f"<|{number}|>" for number in range(len(alphabet), FIRST)]
    tokenizer.add_special_tokens([*nothing, *special_tokens, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
