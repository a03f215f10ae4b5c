"""`flash-eval finetune` takes mlx-lm's training steps, gives both arms equal adapters, and writes a page and a file."""

import dataclasses
import statistics
from types import SimpleNamespace
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from flash_evals.results.arms import ARMS
from flash_evals.results.finetune_result import Settings
from flash_evals.work import machine, measure, training
from flash_evals.work.models import load
from flashattn_core import NoKernelError
from mlx.optimizers import Adam
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from mlx_lm.tuner import trainer
from mlxlm_flash_patch import router
from msgspec.structs import replace

LAYERS = 2  # layers of the model in conftest.py
SETTINGS = Settings(
    batch_size=1, num_layers=LAYERS, rank=4, grad_checkpoint=False, seq_len=[], repetitions=1,
    learning_rate=1e-5, max_memory_gb=None, max_seconds=0, seed=3, memory="",
)  # fmt: skip
NEVER_RAN = "The patch never ran: MLX's own attention computed everything."


@pytest.fixture
def falling_back(monkeypatch):
    """Makes flash attention leave every call to MLX, and count it as a fallback."""
    monkeypatch.setattr(router._ext, "quick", lambda *_: None)
    monkeypatch.setattr(router, "_require_kernel", Mock(side_effect=NoKernelError("a reason")))


def adapted(loaded, settings=SETTINGS):
    return training.trainable(loaded.model, settings.num_layers, settings.rank, settings.grad_checkpoint, settings.seed)


def trained(loaded, seq_len, **changes):
    """Trains the model, which changes its weights. Returns the results by length, and the skipped lengths."""
    settings, skipped = replace(SETTINGS, seq_len=seq_len, **changes), []
    with adapted(loaded, settings):
        taken = {length.seq_len: length for length in training.lengths(loaded, settings, skipped)}
    return taken, [length.seq_len for length in skipped]


def test_every_length(run_command):
    result = run_command("finetune", "-p", "32,8", "-r", 3, "--batch-size", 2, "--num-layers", 1, "--rank", 4)
    assert [length["seq_len"] for length in result["results"]] == [32, 8]
    for length in result["results"]:
        trials = length["trials"]
        assert [trial["order"] for trial in trials] == [["off", "on"], ["on", "off"], ["off", "on"]]
        for arm in ARMS:
            seconds = [trial[arm]["seconds"] for trial in trials]
            assert length[arm]["seconds"] == statistics.median(seconds)
            assert min(seconds) < length[arm]["seconds_p20"] < length[arm]["seconds_p80"] < max(seconds)
            for took in (length[arm], trials[0][arm]):
                assert took["tokens_per_s"] == pytest.approx(2 * length["seq_len"] / took["seconds"])
            assert length[arm]["peak_memory_mb"] == max(trial[arm]["peak_memory_mb"] for trial in trials)
            assert length[arm]["loss"] == trials[-1][arm]["loss"]
        assert length["time_ratio"] == length["on"]["seconds"] / length["off"]["seconds"]
    about = ["LoRA of rank 4 in 1 layers", "batch size 2, random tokens", "off and on taking turns"]
    assert result["page"].split(" · ")[1:4] == about
    assert (result["interrupted"], result["skipped"]) == (False, [])


def test_both_arms_learn_the_same(run_command):
    """The losses of the two arms agree at each step. From the second step on, a loss also depends on the gradients."""
    result = run_command("finetune", "-p", 48, "-r", 4)
    [length], layers = result["results"], result["settings"]["num_layers"]
    off, on = ([trial[arm]["loss"] for trial in length["trials"]] for arm in ARMS)
    np.testing.assert_allclose(on, off, rtol=1e-5)
    assert length["max_abs_dloss"] == max(abs(a - b) for a, b in zip(off, on, strict=True))
    assert len(set(off)) == 4  # each step has new tokens and weights
    again, other = (run_command("finetune", "-p", 48, "-r", 1, "--num-layers", -1, "--seed", seed) for seed in (0, 1))
    assert again["results"][0]["off"]["loss"] == off[0] != other["results"][0]["off"]["loss"]
    assert layers == again["settings"]["num_layers"] == LAYERS


@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("takes_calls", [True, False])
def test_flash_computes_the_gradient(run_command, request, checkpoint, takes_calls):
    """Flash attention computes the gradient. If it never runs, a line on the page says so. Fallbacks are counted only
    while a step is traced, which happens once for each length.
    """
    if not takes_calls:
        request.getfixturevalue("falling_back")
    call = qwen2.TransformerBlock.__call__
    result = run_command("finetune", "-p", "16,32", "-r", 2, *(["--grad-checkpoint"] if checkpoint else []))
    assert qwen2.TransformerBlock.__call__ is call
    assert ("gradient checkpoints" in result["page"]) is checkpoint
    backward = LAYERS * (1 + 2)  # a warm-up and two steps
    again = 2 if checkpoint else 1  # checkpointed layers run forward twice
    flash = {"calls": {"cpu_prefill": again * backward, "cpu_backward": backward}, "fallbacks": {}, "left": {}}
    if not takes_calls:
        flash = {"calls": {}, "fallbacks": {"a reason": again * LAYERS}, "left": {}}
    assert [length["flash"] for length in result["results"]] == [flash] * 2
    doubled = {of: {name: 2 * count for name, count in counts.items()} for of, counts in flash.items()}
    assert result["flash"] == doubled
    assert (NEVER_RAN in result["page"].splitlines()) is not takes_calls
    assert all(length["max_abs_dloss"] < 1e-4 for length in result["results"])


def test_it_is_the_step_of_mlx_lm(model_folder, tmp_path, monkeypatch):
    """For each length, losses equal those of mlx-lm's train() with the same tokens and the same initial adapters."""
    batches, reported, make = [], [], training.make_batch
    monkeypatch.setattr(training, "make_batch", lambda tokens: batches.append(make(tokens)) or batches[-1])
    taken, _ = trained(load(str(model_folder)), [16, 8], repetitions=3)
    callback = SimpleNamespace(
        on_train_loss_report=lambda info: reported.append(info["train_loss"]), on_val_loss_report=lambda info: None
    )
    arguments = trainer.TrainingArgs(iters=4, steps_per_report=1, adapter_file=str(tmp_path / "adapters.safetensors"))
    for of_length in (batches[:4], batches[4:]):
        other, feed = load(str(model_folder)), {"iterate_batches": lambda of=of_length, **_: iter(of)}
        with adapted(other):
            optimizer = Adam(learning_rate=1e-5)
            trainer.train(other.model, optimizer, None, args=arguments, training_callback=callback, **feed)
    losses = [trial.off.loss for length in taken.values() for trial in length.trials]
    np.testing.assert_allclose(losses, reported[1:4] + reported[5:], rtol=1e-6)  # without each length's warm-up


def test_only_the_adapters_of_the_last_layers_learn(model_folder):
    """The adapters' initial values are random, and depend on the seed."""
    of_seeds = []
    for seed in (0, 1):
        loaded = load(str(model_folder))
        with adapted(loaded, replace(SETTINGS, num_layers=1, seed=seed)):
            of_seeds.append(dict(tree_flatten(loaded.model.trainable_parameters())))
    learning, other = of_seeds
    assert {(name.split(".")[2], name.split(".")[-1]) for name in learning} == {("1", "lora_a"), ("1", "lora_b")}
    for name, weight in learning.items():
        if name.endswith("lora_a"):
            assert weight.shape[-1] == SETTINGS.rank
            assert not mx.array_equal(weight, other[name])


@pytest.mark.slow("15 seconds")
def test_what_a_step_needs_is_foreseen(make_model, monkeypatch, request, falling_back):
    """least_memory() counts only the arrays of attention's scores, so a step takes more memory than least_memory().

    With gradient checkpoints, only one layer keeps its scores. After a shorter length, too_long() also counts the other
    memory that a step of this length took, in proportion to the length.
    """
    monkeypatch.setattr(measure, "memory_method", lambda: "peak of MLX's allocator")
    limit = mx.set_memory_limit(1)  # beyond this limit, MLX waits until its thread has freed memory
    request.addfinalizer(lambda: mx.set_memory_limit(limit))
    folder = str(make_model(max_position_embeddings=1024))
    for checkpoint in (True, False):
        taken, _ = trained(load(folder), [64, 256, 768], grad_checkpoint=checkpoint)
        medium, long = (taken[length].off.peak_memory_mb * 1e6 for length in (256, 768))
        least = training.least_memory(load(folder), 768, replace(SETTINGS, grad_checkpoint=checkpoint))
        assert least == ((LAYERS if not checkpoint else 1) + 1) * 4 * 768**2 * 4
        assert 0.6 * long < least < long
    for share, lengths, too_long in ((0.8, [64, 256], [256]), (0.8, [256, 64], []), (1.2, [64, 256], [])):
        _, skipped = trained(load(folder), lengths, max_memory_gb=share * medium / 1e9)
        assert skipped == too_long


@pytest.mark.parametrize(
    ("dtype", "head_dim", "seq_len", "arrays"),
    [("bfloat16", 64, 256, 0), ("bfloat16", 64, 288, 1), ("bfloat16", 256, 256, 3), ("float32", 64, 256, 3)],
)
def test_where_cudnn_keeps_no_scores(loaded, monkeypatch, dtype, head_dim, seq_len, arrays):
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    described = replace(loaded.described, dtype=dtype)
    wide = dataclasses.replace(loaded, config={**loaded.config, "head_dim": head_dim}, described=described)
    scores = loaded.heads * seq_len**2 * (4 if dtype == "float32" else 2)
    assert training.least_memory(wide, seq_len, SETTINGS) == arrays * scores


def test_a_length_that_does_not_fit_is_skipped(run_command, refused, model_folder, monkeypatch):
    # (2 layers + 1) arrays x batch size 24 x 4 heads x 128 x 128 scores x 4 bytes
    needs = "128 tokens: a step without the patch needs at least 0.02 GB"
    result = run_command("finetune", "-p", "128,16", "-r", 1, "--batch-size", 24, "--max-memory", 0.01)
    assert [length["seq_len"] for length in result["results"]] == [16]
    assert result["skipped"] == [{"seq_len": 128, "reason": f"{needs}, --max-memory is 0.01 GB"}]
    assert f"Skipped {needs}, --max-memory is 0.01 GB." in result["page"].splitlines()

    monkeypatch.setattr(machine, "free_memory", lambda: 10_000_000)
    line = refused("finetune", "--model", model_folder, "-p", 128, "--batch-size", 24)
    assert line == f"Error: {needs}, only 0.01 GB are free"


# A step takes 4 s for both arms together. If the warm-up uses up --max-seconds, it counts as the only step.
@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize(("max_seconds", "counted"), [(0, 5), (3, 1), (4.5, 1), (9, 2)])
def test_a_length_that_takes_long_takes_fewer_steps(run_command, monkeypatch, max_seconds, counted):
    run = Mock(side_effect=lambda name, work, tokens, *_: (work(), measure.Measurement(2, tokens / 2, 0)))
    monkeypatch.setattr(training, "run", run)
    lengths = run_command("finetune", "-p", "4,8", "-r", 5, "--max-seconds", max_seconds)["results"]
    assert [len(length["trials"]) for length in lengths] == [counted] * 2  # max_seconds limits each length separately
    warm_ups = 0 if 0 < max_seconds <= 4 else 2
    assert run.call_count == 2 * (2 * counted + warm_ups)
