"""measure_gains.py writes the figures of each command, and repeats none that its file has from the same commit."""

import json

import measure_gains
import pytest
from click.testing import CliRunner

pytestmark = pytest.mark.slow("starts a process for each command")

WRITE = "python packages/evals/scripts/write_random_model.py qwen2.5-0.5b D --dtype float32 num_hidden_layers=1"
RUNS = {
    "models": {"D": f"{WRITE} hidden_size=64 num_attention_heads=2 intermediate_size=64 vocab_size=1100"},
    "speed": {"command": "flash-eval speed --model D -p 16 -g 0 -d 0,8 -r 1", "rows": {"pp16 @ d8": "a prompt"}},
    "training": {
        "command": "FLASHATTN_CPU_ISA=baseline flash-eval finetune --model D -p 16",
        "rows": {"step16": "a step"},
    },
    "kv8": {
        "command": "mlxlm-flash run --kv-bits 8 --kv-group-size 32 -m mlx_lm benchmark --model D -p 16 -g 4 -n 2",
        "rows": {"prompt": "8 bits, a prompt", "generation": "8 bits, generating"},
    },
    "kernels": {"command": "flash-eval kernels --shape 2/1x64 --seq-len 32,64 --impl flash,naive -r 2"},
    "fails": {"command": "flash-eval speed --model missing", "rows": {"pp512": "no figures"}},
}


def test_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_gains, "RUNS", {"cpu": RUNS})
    monkeypatch.setattr(measure_gains, "FOLDER", tmp_path / "models")
    out = tmp_path / "out.json"

    def measure(*names, commit):
        done = CliRunner().invoke(measure_gains.main, ["cpu", str(out), *names, "--commit", commit])
        return done.output, json.loads(out.read_text())

    printed, found = measure("training", "speed", "fails", "kv8", "kernels", commit="one")
    assert "Error: failed: fails" in printed
    assert found["commit"] == "one"
    assert found["machine"]["versions"]["mlx"]
    assert found["models"] == RUNS["models"]
    names = ["a prompt", "a step", "8 bits, a prompt", "8 bits, generating"]
    names += ["2/1x64, 32, float32, forward", "2/1x64, 64, float32, forward"]
    assert [row["name"] for row in found["rows"]] == names
    for row in found["rows"][4:]:
        assert 0 < row["flash"]["lowest"] <= row["flash"]["ms"] <= row["flash"]["highest"]
        assert row["naive"]["flash_speed"]["ratio"] == pytest.approx(row["naive"]["ms"] / row["flash"]["ms"])
    for row in found["rows"][:4]:
        assert row["command"] == RUNS[row["run"]]["command"]
        assert row["on"]["lowest"] <= row["on"]["tokens_per_s"] <= row["on"]["highest"]
    for row in found["rows"][:2]:
        assert row["speed"]["ratio"] == pytest.approx(row["on"]["tokens_per_s"] / row["off"]["tokens_per_s"])
        assert isinstance(row["memory"]["is_clear"], bool)

    monkeypatch.setattr(measure_gains, "call", lambda command, *more: pytest.fail(f"runs {command} again"))
    assert measure("speed", "training", "kv8", "kernels", commit="one") == ("", found)

    monkeypatch.setattr(measure_gains, "measured", lambda name, command, models, rows: [{"run": name}])
    assert measure("kv8", commit="another")[1]["rows"] == [{"run": "kv8"}]
