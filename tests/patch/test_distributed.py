"""If mlx.launch spreads a model over two processes, both run flash attention, and generate the same tokens."""

import json
import shutil

import pytest
from mlx.utils import tree_flatten

from tests.patch.two_ranks import PROGRAMS, launch

SCRIPT = """
import json, sys
import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.generate import stream_generate
from mlx_lm.utils import sharded_load

how, folder = sys.argv[1:]
group = mx.distributed.init()
model, tokenizer = sharded_load(folder, **{how + "_group": group})

def tokens():
    return [step.token for step in stream_generate(model, tokenizer, "Attention is all", max_tokens=6)]

on, status = tokens(), flash.status()
flash.disable()
off, after = tokens(), flash.status()
print(json.dumps({
    "rank": group.rank(), "size": group.size(), "on": on, "off": off,
    "calls": dict(status.calls), "calls_when_off": {k: n - status.calls.get(k, 0) for k, n in after.calls.items()},
    "fallbacks": dict(status.fallbacks),
}))
"""


@pytest.mark.slow("two processes for 20 seconds")
@pytest.mark.rotate(4)
@pytest.mark.parametrize(
    ("how", "model_type"), [("tensor", "qwen2"), ("pipeline", "qwen2"), ("tensor", "llama"), ("tensor", "gpt_oss")]
)
def test_the_same_tokens(tiny, model_folder, tmp_path, how, model_type):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    model = tiny(model_type, vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"])
    model.save_weights(str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(vars(model.args)))
    index = {"weight_map": {name: "model.safetensors" for name, _ in tree_flatten(model.parameters())}}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index)
    )  # sharded_load() reads here which files a rank needs

    (tmp_path / "script.py").write_text(SCRIPT)
    run = (PROGRAMS / "mlxlm-flash", "run", tmp_path / "script.py", how, folder)
    stdout, stderr = launch(*run, MLXLM_FLASH="strict", HF_HUB_OFFLINE="1")
    ranks = sorted((json.loads(line) for line in stdout.splitlines()), key=lambda rank: rank["rank"])
    assert [(rank["rank"], rank["size"]) for rank in ranks] == [(0, 2), (1, 2)], stderr
    layers = 2 if how == "tensor" else 1
    for rank in ranks:
        assert rank["on"] == rank["off"] == ranks[0]["off"]
        assert rank["calls"]["cpu_decode"] >= len(rank["on"]) * layers
        assert rank["fallbacks"] == {}
        assert not any(rank["calls_when_off"].values())
    assert any("cpu_prefill" in rank["calls"] for rank in ranks)
