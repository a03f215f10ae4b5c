"""Trains from scratch the small Qwen2 that `flash_evals` contains: tokenizer, weights, model card.

The script needs flash-evals and its dependencies, but no network and no GPU. On Linux, preload OpenBLAS (apt install
libopenblas0-pthread), because MLX's wheel multiplies matrices with a slow reference BLAS. More than one BLAS thread
hardly helps, because softmax and SiLU take most of the time, and MLX computes them on one thread.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=libopenblas.so.0 python packages/evals/scripts/train_demo_model.py

The corpus is small and read many times. So training uses dropout, weight decay, and another tokenisation of the words
on each pass. The script keeps the weights that are best on the held-out text. This makes the held-out perplexity a
little too good. That does not matter, because the model only serves to compare two runs of the same weights.
"""

import bz2
import json
import lzma
import math
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from flash_evals.work.pydoc_text import documents
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.qwen2 import Model, ModelArgs
from transformers import Qwen2Tokenizer

ARGS = ModelArgs(
    model_type="qwen2",
    hidden_size=128,
    num_hidden_layers=4,
    intermediate_size=448,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    vocab_size=1024,
    max_position_embeddings=8192,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
EOS, EOS_ID = "<|endoftext|>", 0
WINDOWS = (256, 256, 512)  # sizes of a training row in tokens; each pass over the text draws one of them
BATCH_TOKENS = 2048
PEAK_RATE, FLOOR, WARMUP_STEPS = 2e-3, 0.02, 150
WEIGHT_DECAY = 0.3
DROPOUT = 0.15
SPLIT_RATE = 0.05
EVALUATE_EVERY = 100

CARD = """\
# A small Qwen2 for flash-eval

{parameters:,} parameters, float32, in mlx-lm's layout, trained on Python's documentation: enough to compare two
attention implementations on a trained model's attention patterns. It is of no other use.

- **Architecture**: Qwen2 with {layers} layers, hidden size {hidden}, MLP {mlp}, {heads} query and
  {kv_heads} key/value heads of {head_dim}, RoPE, RMSNorm, QKV bias, tied embeddings.
- **Tokenizer**: Qwen2's byte-level BPE, {vocab} tokens, among them one special token, `{eos}`. No BOS.
- **Text**: `pydoc_data.topics` of CPython {python}: {train_topics} topics ({train_tokens:,} tokens) to train,
  {heldout_topics} held out, which share no passage with the others (`flash_evals/work/pydoc_text.py`).
- **Made by** `packages/evals/scripts/train_demo_model.py --seed {seed} --steps {steps}` with
  MLX {mlx} on the CPU; the script's first lines have the whole command.
- **Tokens seen**: {tokens_seen:,}, in windows of 256 and 512. The weights are those of step {best_step}, the best
  on the held-out text, which flatters the figures below a little.

On the held-out text, {heldout_bytes:,} bytes or {heldout_tokens:,} tokens, each document after an `{eos}`, in
windows side by side:

| context | token perplexity | byte perplexity | bits per byte |
|---|---|---|---|
{results}

It has not been trained beyond 512 tokens, and shows it.

What others need for the same bytes after the same training text:

| | bits per byte |
|---|---|
{baselines}

The documentation's wording differs between Python versions, and so do these figures.

The text, and so what was learned from it: Copyright © 2001 Python Software Foundation,
[PSF License Version 2](https://docs.python.org/3/license.html).
"""


def merged_from(tokenizer: Qwen2Tokenizer) -> np.ndarray:
    """For each token, the two tokens that BPE merged into it; (-1, -1) for a byte."""
    parts = np.full((ARGS.vocab_size, 2), -1, np.int32)
    for left, right in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]:
        merged, *pair = tokenizer.convert_tokens_to_ids([left + right, left, right])
        parts[merged] = pair
    return parts


def split_some(tokens: np.ndarray, parts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """BPE dropout (Provilkov 2020), drawn from `rng`. Undoes some merges, so that each pass has different tokens."""
    for _ in range(3):
        split = (rng.random(len(tokens)) < SPLIT_RATE) & (parts[tokens, 0] >= 0)
        pairs = np.where(split[:, None], parts[tokens], np.stack([tokens, np.full_like(tokens, -1)], axis=1))
        tokens = pairs[pairs >= 0]
    return tokens


def batches(
    encoded: list[np.ndarray], parts: np.ndarray, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields inputs and targets endlessly. Each pass shuffles the texts, splits tokens and cuts the rows anew."""
    while True:
        window = int(rng.choice(WINDOWS))
        shuffled = [split_some(encoded[i], parts, rng) for i in rng.permutation(len(encoded))]
        stream = np.concatenate([part for tokens in shuffled for part in ([EOS_ID], tokens)]).astype(np.int32)
        stream = stream[rng.integers(window) :]
        count = (len(stream) - 1) // window
        inputs, targets = (stream[at : at + count * window].reshape(count, window) for at in (0, 1))
        rows = BATCH_TOKENS // window
        order = rng.permutation(count)
        for start in range(0, count - rows + 1, rows):
            chosen = order[start : start + rows]
            yield inputs[chosen], targets[chosen]


class DropoutLinear(nn.Linear):
    """A Linear with dropout on its output, which goes into the residual stream. mlx-lm's Qwen2 has no dropout."""

    def __call__(self, x: mx.array) -> mx.array:
        y = super().__call__(x)
        return mx.where(mx.random.bernoulli(1 - DROPOUT, y.shape), y / (1 - DROPOUT), 0) if self.training else y


def new_model() -> Model:
    model = Model(ARGS)

    def initial(path: str, weight: mx.array) -> mx.array:
        if weight.ndim == 1:
            return mx.zeros_like(weight) if path.endswith("bias") else mx.ones_like(weight)
        if "o_proj" in path or "down_proj" in path:  # as in GPT-2: all layers together add as much variance as one
            return mx.random.normal(weight.shape, scale=0.02 / math.sqrt(2 * ARGS.num_hidden_layers))
        return mx.random.normal(weight.shape, scale=0.02 if "embed" in path else 0.05)

    model.update(tree_map_with_path(initial, model.parameters()))
    for layer in model.layers:
        layer.self_attn.o_proj.__class__ = layer.mlp.down_proj.__class__ = DropoutLinear
    return model


def new_optimizer(steps: int) -> optim.Optimizer:
    rate = optim.join_schedules(
        [
            optim.linear_schedule(0, PEAK_RATE, WARMUP_STEPS),
            optim.cosine_decay(PEAK_RATE, steps - WARMUP_STEPS, FLOOR * PEAK_RATE),
        ],
        [WARMUP_STEPS],
    )
    decayed, not_decayed = (
        optim.AdamW(rate, betas=[0.9, 0.98], weight_decay=decay, bias_correction=True) for decay in (WEIGHT_DECAY, 0.0)
    )
    return optim.MultiOptimizer([decayed, not_decayed], [lambda _, weight: weight.ndim == 2])  # only matrices decay


def negative_log_likelihood(model: Model, encoded: list[np.ndarray], context: int) -> float:
    """Returns -ln p of all documents, in nats. The model reads them in disjoint windows, each document after an EOS."""
    stream = np.concatenate([part for tokens in encoded for part in ([EOS_ID], tokens)]).astype(np.int32)
    stream = np.pad(stream, (0, -(len(stream) - 1) % context), constant_values=EOS_ID)
    inputs, targets = mx.array(stream[:-1].reshape(-1, context)), mx.array(stream[1:].reshape(-1, context))
    model.eval()
    total = 0.0
    for x, y in zip(inputs, targets, strict=True):
        losses = nn.losses.cross_entropy(model(x[None])[0], y)
        total += mx.where(y == EOS_ID, 0, losses).sum().item()  # EOS is no text
    model.train()
    return total


def ngram_bits_per_byte(train: list[bytes], heldout: list[bytes], order: int) -> float:
    """A baseline: a byte-level n-gram model with Witten-Bell smoothing."""
    counts: list[dict[bytes, Counter[int]]] = [defaultdict(Counter) for _ in range(order + 1)]
    for text in train:
        for i, byte in enumerate(text):
            for length in range(min(order, i) + 1):
                counts[length][text[i - length : i]][byte] += 1
    bits = 0.0
    for text in heldout:
        for i, byte in enumerate(text):
            probability = 1 / 256
            for length in range(min(order, i) + 1):
                seen = counts[length].get(text[i - length : i])
                if seen:
                    probability = (seen[byte] + len(seen) * probability) / (seen.total() + len(seen))
            bits -= math.log2(probability)
    return bits / sum(map(len, heldout))


def compressed_bits_per_byte(train: list[bytes], heldout: list[bytes], compress: Callable[[bytes], bytes]) -> float:
    """A baseline: how much the held-out text adds to the compressed training text."""
    before, after = (len(compress(b"".join(texts))) for texts in (train, train + heldout))
    return 8 * (after - before) / sum(map(len, heldout))


def save(out: Path, weights: dict[str, mx.array], tokenizer: Qwen2Tokenizer) -> None:
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save_pretrained(out)
    ids = {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        **{key: value for key, value in asdict(ARGS).items() if key not in ("rope_traditional", "rope_scaling")},
        **ids,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    for name, content in {"config": config, "generation_config": ids}.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seed", default=0)
@click.option("--steps", default=2400, help=f"Optimizer steps of {BATCH_TOKENS:,} tokens.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(__file__).parents[1] / "src/flash_evals/work/demo_model",
    show_default="the package",
    help="Folder to write the model to.",
)
def main(seed: int, steps: int, out: Path) -> None:
    """Train the demo model on `documents("train")` and write it with its card."""
    rng = np.random.default_rng(seed)
    mx.random.seed(seed)
    model = new_model()

    train, heldout = documents("train"), documents("heldout")
    # transformers uses this class for every model of type qwen2, whatever the model's tokenizer.json says.
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(train, ARGS.vocab_size, show_progress=False)
    encoded, heldout_encoded = (
        [np.array(tokenizer.encode(text), np.int32) for text in texts] for texts in (train, heldout)
    )
    heldout_bytes = sum(len(text.encode()) for text in heldout)
    heldout_tokens = sum(map(len, heldout_encoded))

    optimizer = new_optimizer(steps)
    loss_and_gradients = nn.value_and_grad(model, lambda x, y: nn.losses.cross_entropy(model(x), y, reduction="mean"))
    best_loss, best_step, best = math.inf, 0, {}
    started = time.perf_counter()
    for step, (inputs, targets) in enumerate(batches(encoded, merged_from(tokenizer), rng), 1):
        loss, gradients = loss_and_gradients(mx.array(inputs), mx.array(targets))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if step % EVALUATE_EVERY == 0 or step == steps:
            nll = negative_log_likelihood(model, heldout_encoded, max(WINDOWS))
            if nll < best_loss:
                best_loss, best_step, best = nll, step, dict(tree_flatten(model.parameters()))
            perplexity, bits = math.exp(nll / heldout_tokens), nll / math.log(2) / heldout_bytes
            click.echo(
                f"step {step}/{steps}, {time.perf_counter() - started:.0f} s: train {loss.item():.3f}, "
                f"held out: perplexity {perplexity:.2f}, bits per byte {bits:.4f}"
            )
        if step == steps:
            break

    model.load_weights(list(best.items()))
    results = []
    for context in (256, 512, 1024, 2048):
        nll = negative_log_likelihood(model, heldout_encoded, context)
        perplexities = f"{math.exp(nll / heldout_tokens):.2f} | {math.exp(nll / heldout_bytes):.3f}"
        results.append(f"| {context} | {perplexities} | {nll / math.log(2) / heldout_bytes:.3f} |")
    as_bytes = [text.encode() for text in train], [text.encode() for text in heldout]
    baselines = {f"n-gram of bytes, order {order}": ngram_bits_per_byte(*as_bytes, order) for order in (0, 2, 3, 4)}
    for name, compress in {"xz": lzma.compress, "bzip2": bz2.compress}.items():
        baselines[f"{name}, which goes on learning from the text"] = compressed_bits_per_byte(*as_bytes, compress)
    save(out, best, tokenizer)
    card = CARD.format(
        parameters=sum(weight.size for weight in best.values()),
        layers=ARGS.num_hidden_layers,
        hidden=ARGS.hidden_size,
        heads=ARGS.num_attention_heads,
        kv_heads=ARGS.num_key_value_heads,
        head_dim=ARGS.hidden_size // ARGS.num_attention_heads,
        mlp=ARGS.intermediate_size,
        vocab=ARGS.vocab_size,
        eos=EOS,
        python=platform.python_version(),
        mlx=mx.__version__,
        train_topics=len(train),
        train_tokens=sum(map(len, encoded)),
        heldout_topics=len(heldout),
        seed=seed,
        steps=steps,
        best_step=best_step,
        tokens_seen=best_step * BATCH_TOKENS,
        heldout_bytes=heldout_bytes,
        heldout_tokens=heldout_tokens,
        results="\n".join(results),
        baselines="\n".join(f"| {name} | {bits:.3f} |" for name, bits in baselines.items()),
    )
    (out / "README.md").write_text(card)


if __name__ == "__main__":
    main()
