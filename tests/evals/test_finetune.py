"""`flash-eval finetune`: mlx-lm's own training step, both arms from the same start, and what it writes."""

import dataclasses
import statistics
from functools import partial
from types import SimpleNamespace
from xml.etree import ElementTree

import mlx.core as mx
import numpy as np
import pytest
from flash_evals import finetune, machine, measure, training
from flash_evals.errors import EvalError
from flash_evals.finetune_result import Result
from flash_evals.measure import ARMS
from flash_evals.models import load
from flash_evals.page.finetune import charts
from flash_evals.training import Settings
from mlx.optimizers import Adam
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from mlx_lm.tuner import trainer
from mlxlm_flash_patch import route
from msgspec import convert
from msgspec.structs import replace

COMMAND = ("finetune",)  # of `evaluate`

LAYERS = 2  # of the model in conftest.py
SETTINGS = Settings(
    batch_size=1, num_layers=LAYERS, rank=4, grad_checkpoint=False, seq_len=[], repetitions=1,
    learning_rate=1e-5, max_memory_gb=None, max_seconds=0, seed=0, memory="",
)  # fmt: skip
NEVER_RAN = "The patch never ran: all of this is MLX's own attention."


@pytest.fixture
def fresh(model_folder):
    """A model of the test's own: training changes it."""
    return load(str(model_folder))


@pytest.fixture
def falling_back(monkeypatch):
    """No call can be flash attention."""
    monkeypatch.setattr(route, "reason_not_to", lambda *_: "a reason")


def steps(loaded, settings, seq_len, repetitions):
    """The steps that are counted, on a model that is then of no further use."""
    with training.trainable(loaded.model, settings, seed=3):
        asked = replace(settings, seq_len=seq_len, repetitions=repetitions)
        return list(training.steps(loaded, asked, fits=lambda length, longest: True))


def test_every_length(evaluate):
    result = evaluate("-p", "32,8", "-r", 3, "--batch-size", 2, "--num-layers", 1, "--rank", 4)
    assert [length["seq_len"] for length in result["results"]] == [32, 8]
    for length in result["results"]:
        trials = length["trials"]
        assert [trial["order"] for trial in trials] == [["off", "on"], ["on", "off"], ["off", "on"]]
        for arm in ARMS:
            seconds = [trial[arm]["seconds"] for trial in trials]
            assert length[arm]["seconds"] == statistics.median(seconds)
            assert min(seconds) < length[arm]["seconds_p20"] < length[arm]["seconds_p80"] < max(seconds)
            for tokens_per_s, of in (
                (length[arm]["tokens_per_s"], length),
                (trials[0][arm]["tokens_per_s"], trials[0]),
            ):
                assert tokens_per_s == pytest.approx(2 * length["seq_len"] / of[arm]["seconds"])
            assert length[arm]["peak_memory_mb"] == max(trial[arm]["peak_memory_mb"] for trial in trials)
            assert length[arm]["loss"] == trials[-1][arm]["loss"]
        assert length["time_ratio"] == length["on"]["seconds"] / length["off"]["seconds"]
    lines = result["page"].splitlines()
    about = ["LoRA of rank 4 in 1 layers", "batch size 2, random tokens", "off and on taking turns"]
    assert lines[0].split(" · ")[1:4] == about
    assert [line.split()[0] for line in lines[2:9]] == ["tokens", "32", "on", "on/off", "8", "on", "on/off"]
    assert (result["interrupted"], result["skipped"]) == (False, [])


def test_both_arms_learn_the_same(evaluate):
    """From the second step on through the gradient too. The seed decides what."""
    [length] = evaluate("-p", 48, "-r", 4)["results"]
    off, on = ([trial[arm]["loss"] for trial in length["trials"]] for arm in ARMS)
    np.testing.assert_allclose(on, off, rtol=1e-5)
    assert length["max_abs_dloss"] == max(abs(a - b) for a, b in zip(off, on, strict=True))
    assert len(set(off)) == 4  # new tokens, and weights that have changed
    [again], [other] = (evaluate("-p", 48, "-r", 1, "--seed", seed)["results"] for seed in (0, 1))
    assert again["off"]["loss"] == off[0] != other["off"]["loss"]


@pytest.mark.parametrize("checkpoint", [(), ("--grad-checkpoint",)])
def test_flash_computes_the_gradient(evaluate, checkpoint):
    """The checkpoints end with the run."""
    call = qwen2.TransformerBlock.__call__
    result = evaluate("-p", "16,32", "-r", 2, *checkpoint)
    assert qwen2.TransformerBlock.__call__ is call
    assert ("gradient checkpoints" in result["page"]) is bool(checkpoint)
    backward = LAYERS * (1 + 2)  # the warm-up counts
    forward = backward * (2 if checkpoint else 1)  # the layer is computed anew
    calls = {"cpu_prefill": forward, "cpu_backward": backward}
    assert [length["flash"] for length in result["results"]] == [{"calls": calls, "fallbacks": {}}] * 2
    assert result["flash"]["calls"] == {kernel: 2 * count for kernel, count in calls.items()}
    assert f"flash: cpu_backward {2 * backward} calls, cpu_prefill {2 * forward} calls, 0 fall" in result["page"]
    assert NEVER_RAN not in result["page"]
    assert all(length["max_abs_dloss"] < 1e-4 for length in result["results"])


def test_flash_that_takes_no_calls(evaluate, falling_back):
    """The step is traced once for each length, and one line says what that means."""
    result = evaluate("-p", "16,32", "-r", 2)
    assert result["flash"] == {"calls": {}, "fallbacks": {"a reason": 2 * LAYERS}}
    assert NEVER_RAN in result["page"].splitlines()
    assert [length["max_abs_dloss"] for length in result["results"]] == [0, 0]


def test_it_is_the_step_of_mlx_lm(fresh, model_folder, tmp_path, monkeypatch):
    """The losses that its own train() reports on the same tokens and from the same adapters, for each length."""
    batches, make = [], training._batch
    monkeypatch.setattr(training, "_batch", lambda tokens: batches.append(make(tokens)) or batches[-1])
    losses = [step.trial.off.loss for step in steps(fresh, SETTINGS, [16, 8], 3)]

    def train(batches):
        reported, other = [], load(str(model_folder)).model
        callback = SimpleNamespace(
            on_train_loss_report=lambda info: reported.append(info["train_loss"]), on_val_loss_report=lambda info: None
        )
        adapters = str(tmp_path / "adapters.safetensors")
        with training.trainable(other, SETTINGS, seed=3):
            trainer.train(
                other,
                Adam(learning_rate=1e-5),
                train_dataset=None,
                args=trainer.TrainingArgs(iters=4, steps_per_report=1, adapter_file=adapters),
                iterate_batches=lambda **_: iter(batches),
                training_callback=callback,
            )
        return reported[1:]  # the first warmed up

    np.testing.assert_allclose(losses, train(batches[:4]) + train(batches[4:]), rtol=1e-6)


@pytest.mark.parametrize(("num_layers", "adapted"), [(1, {"1"}), (-1, {"0", "1"})])
def test_only_the_adapters_of_the_last_layers_learn(fresh, num_layers, adapted):
    settings = replace(SETTINGS, num_layers=finetune._layers(num_layers, fresh))
    before = {name: np.array(weight) for name, weight in tree_flatten(fresh.model.parameters())}
    steps(fresh, settings, [8], 2)
    after = dict(tree_flatten(fresh.model.parameters()))
    adapters = {name for name in after if "lora" in name}
    assert set(dict(tree_flatten(fresh.model.trainable_parameters()))) == adapters
    assert {name.split(".")[2] for name in adapters} == adapted
    assert {after[name].shape[-1] for name in adapters if name.endswith("lora_a")} == {SETTINGS.rank}
    assert all(np.any(np.array(after[name])) for name in adapters if name.endswith("lora_b"))  # they begin at 0
    for name, weight in before.items():
        kept = after.get(name, after.get(name.replace(".weight", ".linear.weight").replace(".bias", ".linear.bias")))
        np.testing.assert_array_equal(np.array(kept), weight)


def test_a_step_gives_up_the_adapters_that_it_replaces(monkeypatch, falling_back):
    """As in mlx-lm, where nobody else changes the model: else taking turns would cost their memory."""
    grown = []

    def step(trainee, batch):
        before = mx.get_active_memory()
        loss = one_step(trainee, batch)
        mx.synchronize()
        grown.append(mx.get_active_memory() - before)
        return loss

    one_step = training.Trainee.step
    monkeypatch.setattr(training.Trainee, "step", step)
    loaded = load(None)
    steps(loaded, replace(SETTINGS, num_layers=4, rank=256), [8], 3)
    adapters = sum(array.nbytes for _, array in tree_flatten(loaded.model.trainable_parameters()))
    # What every length begins with is kept, and both arms begin with it.
    assert grown == [pytest.approx(adapters, rel=0.01)] * 2 + [0] * 6


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_a_step_needs_is_foreseen(make_model, monkeypatch, request, falling_back, checkpoint):
    """By the scores, never more, and most of it where the length is long for the model; by a shorter length, where the
    layers need as much.
    """
    monkeypatch.setattr(measure, "memory_method", lambda: "peak of MLX's allocator")
    request.addfinalizer(partial(mx.set_memory_limit, mx.set_memory_limit(1)))  # MLX then waits for its thread
    loaded, settings = (
        load(str(make_model(max_position_embeddings=1024))),
        replace(SETTINGS, grad_checkpoint=checkpoint),
    )
    taken = steps(loaded, settings, [64, 256, 768], 1)
    _, medium, long = (step.trial.off.peak_memory_mb * 1e6 for step in taken)
    least = training.least_memory(loaded, 768, settings)
    assert least == ((LAYERS if not checkpoint else 1) + 1) * 4 * 768**2 * 4
    assert 0.6 * long < least < long  # so checkpoints of two layers save a third
    assert training.expected_memory(loaded, 256, settings, None) == training.least_memory(loaded, 256, settings)
    if not checkpoint:
        assert training.least_memory(loaded, 256, settings) < 0.8 * medium
        assert training.expected_memory(loaded, 256, settings, taken[0]) == pytest.approx(medium, rel=0.2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "seq_len", "arrays"),
    [
        ("bfloat16", 64, 256, 0),
        ("bfloat16", 64, 288, 1),
        ("bfloat16", 256, 256, SETTINGS.num_layers + 1),
        ("float32", 64, 256, SETTINGS.num_layers + 1),
    ],
)
def test_where_cudnn_keeps_no_scores(loaded, monkeypatch, dtype, head_dim, seq_len, arrays):
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    described = replace(loaded.described, dtype=dtype)
    wide = dataclasses.replace(loaded, config={**loaded.config, "head_dim": head_dim}, described=described)
    scores = loaded.heads * seq_len**2 * (4 if dtype == "float32" else 2)
    assert training.least_memory(wide, seq_len, SETTINGS) == arrays * SETTINGS.batch_size * scores


def test_a_config_without_heads_is_refused(loaded):
    snake = dataclasses.replace(loaded, config={}, described=replace(loaded.described, name="Snake"))
    with pytest.raises(EvalError, match=r"config.json of Snake does not say how many heads it has"):
        training.least_memory(snake, 8, SETTINGS)


def test_a_length_that_does_not_fit_is_skipped(evaluate, refused, model_folder, monkeypatch):
    needs = "128 tokens: a step without the patch needs at least 0.02 GB"  # 3 x 24 x 4 heads x 128^2 x 4 bytes
    result = evaluate("-p", "128,16", "-r", 1, "--batch-size", 24, "--max-memory", 0.01)
    assert [length["seq_len"] for length in result["results"]] == [16]
    assert result["skipped"] == [{"seq_len": 128, "reason": f"{needs}, --max-memory is 0.01 GB"}]
    assert f"Skipped {needs}, --max-memory is 0.01 GB." in result["page"].splitlines()

    monkeypatch.setattr(machine, "free_memory", lambda: 10_000_000)
    line = refused("finetune", "--model", model_folder, "-p", 128, "--batch-size", 24)
    assert line == f"Error: {needs}, 0.01 GB are free"


@pytest.mark.parametrize(
    ("max_seconds", "counted"),
    [
        (0, 5),  # no limit
        (3, 1),  # the first pair has taken 4: it counts, and is all
        (4.5, 1),  # the second counts alone: the first warmed up
        (9, 2),
    ],
)
def test_a_length_that_takes_long_takes_fewer_steps(evaluate, monkeypatch, max_seconds, counted):
    calls = []

    def run(name, work, tokens, _):
        calls.append(name)
        return work(), measure.Measurement(2, tokens / 2, 0)

    monkeypatch.setattr(training, "run", run)
    lengths = evaluate("-p", "4,8", "-r", 5, "--max-seconds", max_seconds)["results"]
    assert [len(length["trials"]) for length in lengths] == [counted] * 2  # each length has the time to itself
    warm_ups = 0 if 0 < max_seconds <= 4 else 2
    assert len(calls) == 2 * (2 * counted + warm_ups)


def test_plot(evaluate, tmp_path):
    """The charts of the page, of growing length."""
    result = evaluate("-p", "32,8", "-r", 1, "--plot", tmp_path / "out.svg")
    picture = ElementTree.parse(tmp_path / "out.svg").getroot()
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Time of a step", "Peak memory of a step", result["machine"]["device"]} <= set(texts)
    lengths = [
        [point.length for point in line.points] for chart in charts(convert(result, Result)) for line in chart.series
    ]
    assert lengths == [[8, 32]] * 4
