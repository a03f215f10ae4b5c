"""Impossible requests end with one line on stderr and exit code 2, before any work starts."""

from pathlib import Path
from unittest.mock import Mock

import flashattn_core
import pytest
from flash_evals.results.errors import EvalError, failing, one_line

# Maps arguments to a part of the error that they cause.
PERPLEXITY = {
    "--context 1": "--context must be at least 2, not 1",
    "--stride 0 --context 64": "--stride must be between 1 and the context of 64, not 0",
    "--stride 65 --context 64": "--stride must be between 1 and the context of 64, not 65",
    "--batch-size 0": "--batch-size must be at least 1, not 0",
    "--max-windows 0": "--max-windows must be at least 1, not 0",
    "--context 129": "--context needs 129 positions, ",
    "--revision main": "--revision has no meaning for the folder",
    "--model ./missing": "no such model folder: ./missing",
    "--json missing/out.json": "--json missing/out.json: missing is missing or not writable",
    "--json / --model ./missing": "--json /: this is a folder",  # --json is checked before --model
    "--scoring half --stride 8": "--stride has no meaning with --scoring half",
    "--scoring half --documents separate": "--documents separate has no meaning with --scoring half",
    "--scoring half --context 2": "--scoring half takes a --context of at least 3, not 2",
    "--compare a.jsonl": "--compare needs --arm off or --arm on: the other arm comes from the file",
    "--arm on --compare missing.jsonl": "--compare cannot read missing.jsonl: No such file",
    "--save-logprobs a.jsonl --resume b.jsonl": "--resume also saves scores, as --save-logprobs does",
    "--save-logprobs a --json a": "--save-logprobs and --json name the same file: a",
    "--arm on --compare a --resume ./a": "--compare and --resume name the same file: a",
    "--save-logprobs /dev/null": "cannot write /dev/null: Invalid argument",
    "--save-logprobs missing/a.jsonl": "--save-logprobs missing/a.jsonl: missing is missing or not writable",
}
SHORT = {
    "--dataset short.txt": "short.txt has 1 tokens for this model; scoring needs at least 2",
    "--dataset short.txt --scoring half --context 40": "--scoring half needs at least --context 40",
    "--dataset short.txt --documents separate": "the longest document of short.txt has 1 tokens for this model",
}
SPEED = {
    "-p 0 -g 0": "nothing to measure",
    "-p many": "-p takes numbers of tokens separated by commas, not 'many'",
    "-d 0,-1": "-d takes numbers of tokens separated by commas, not '0,-1'",
    "-g ,": "-g takes numbers of tokens separated by commas, not ','",
    "-b 0": "-b takes numbers of sequences separated by commas, not '0'",
    "-p 100 -d 0,29": "pp100 @ d29 needs 129 positions",
    "-p 0 -g 129 -d 0": "tg129 needs 129 positions",
    "--num-draft-tokens 2": "--num-draft-tokens needs --draft-model",
    "--draft-model model --num-draft-tokens 0": "--num-draft-tokens must be at least 1, not 0",
    "--draft-model model -g 0": "--draft-model needs -g: prompts do not use the draft model",
    "--draft-model model -b 1,2": "--draft-model needs -b 1: mlx-lm has no speculative decoding",
    "--draft-model ./missing": "no such model folder: ./missing",
    "--draft-model model -p 0 -g 128 -d 0": "tg128 needs 129 positions",
}
FINETUNE = {
    "-p 0": "-p takes numbers of tokens separated by commas, not '0'",
    "-p 8,129": "--seq-len 129 needs 129 positions",
    "--rank 0": "--rank must be at least 1, not 0",
    "--num-layers 0": "--num-layers must be -1, or 1 to 2 (the layers of",
    "--num-layers 3": "--num-layers must be -1, or 1 to 2 (the layers of",
    "--max-seconds -1": "--max-seconds must be at least 0, not -1",
    "--max-seconds inf": "--max-seconds must be at most 9,007,199,254,740,992, not inf",
    "--max-memory -1": "--max-memory must be at least 0, not -1",
}
KERNELS = {
    "--shape 14x64": "--shape takes query heads / key-value heads x head_dim, such as 14/2x64, separated by",
    **{f"--shape {shape}": f"not '{shape}'" for shape in ("14/3x64", "14/2x64,0/1x64", "14/0x64")},
    "--seq-len 100000000000 --impl flash": "cannot make inputs for 14/2x64, 100000000000 queries",
    "--seq-len 00": "--seq-len takes numbers of keys separated by commas, not '00'",
    "--dtype float64": "--dtype takes float32, float16, bfloat16 separated by commas, not 'float64'",
    "--pass both": "--pass takes forward, backward, forward_backward separated by commas, not 'both'",
    "--pass forward,backward --query-len 1": "--pass with gradients needs at least 2 queries: a single query is",
    "--seq-len 1,32": "--seq-len 1 is a decode step, measured in GB/s: run it separately from longer --seq-len",
    "--impl flash,xla": "--impl takes flash, mlx, naive, torch separated by commas, not 'flash,xla'",
    "--impl flash,torch": "--impl torch needs MLX's CPU device, and pip install torch==2.13.0",
    "--query-len 0": "--query-len must be at least 1, not 0",
    "--query-len 40": "--causal needs a --query-len of at most --seq-len 32, not 40",
    "--window 0": "--window must be at least 1, not 0",
    "--window 4 --no-causal": "--window 4 is causal: leave out --no-causal",
    "--max-seconds nan": "--max-seconds must be at least 0, not nan",
    "--kv-bits 5": "--kv-bits takes none, 2, 3, 4, 6, 8 separated by commas, not '5'",
    "--kv-bits 8 --shape 4/2x8": "--kv-bits needs a multiple of 64 as head_dim, not 8",
    "--kv-bits 8 --pass forward,backward": "--kv-bits needs --pass forward",
    "--kv-bits 8 --impl naive": "--kv-bits needs --impl flash, mlx, not naive",
}
TIMED = {
    f"--seed {10**20}": f"--seed must be at most 9,007,199,254,740,992, not {10**20}",
    "--seed -1": "--seed must be at least 0, not -1",
    "-r 0": "-r must be at least 1, not 0",
}
BATCH = {"--batch-size 0": "-b must be at least 1, not 0"}
COMMANDS = {
    "perplexity --model model --dataset text.txt --context 24": PERPLEXITY,
    "perplexity --model model --context 24": SHORT,
    "speed --model model": SPEED | TIMED,
    "finetune --model model": FINETUNE | TIMED | BATCH,
    "kernels --seq-len 32": KERNELS | TIMED | BATCH,
}
CASES = [(f"{command} {more}", line) for command, cases in COMMANDS.items() for more, line in cases.items()]


@pytest.mark.parametrize(("arguments", "line"), CASES)
def test_arguments(refused, model_folder, text_file, tmp_path, monkeypatch, quick_machine, arguments, line):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("T")
    Path("model").symlink_to(model_folder)
    assert line in refused(*arguments.split())


@pytest.mark.parametrize("command", ["perplexity", "speed", "finetune", "kernels"])
def test_nonsense_in_a_variable_is_named(refused, command, monkeypatch):
    error = ValueError("FLASHATTN_NUM_THREADS must be a positive number, not 'many'")
    monkeypatch.setattr(flashattn_core, "backends", Mock(side_effect=error))
    assert "FLASHATTN_NUM_THREADS" in refused(command)


def raised(message, *causes):
    """An error with this message. `causes` are the messages of its cause, of the cause of the cause, and so on."""
    error = RuntimeError(message)
    if causes:
        error.__cause__ = raised(*causes)
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (raised("no room"), "no room"),
        (raised("Not in the model:\n  one,\n  two."), "Not in the model: one, two."),
        (raised("cannot read the file", "disk on fire"), "cannot read the file; caused by: disk on fire"),
        (raised("cannot read: disk on fire", "disk on fire"), "cannot read: disk on fire"),
        (raised("a", "b\nc", "d"), "a; caused by: b c; caused by: d"),
        (raised("", "why"), "RuntimeError; caused by: why"),
        (raised("x" * 1000, "why"), "x" * 299 + "…; caused by: why"),
    ],
)
def test_a_foreign_error_keeps_its_cause_in_one_line(error, line):
    assert one_line(error) == line
    with pytest.raises(EvalError) as refusal, failing("it fails"):
        raise error
    assert refusal.value.message == f"it fails: {line}"
