"""With no options: the shipped model on the shipped text, with no network, and the two arms agree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_the_defaults_need_no_network(in_fresh_process: Callable[..., list[Any]], tmp_path: Path) -> None:
    out, cache = tmp_path / "out.json", tmp_path / "hf"
    [outcome] = in_fresh_process(
        ["perplexity", "--max-windows", 4, "--json", out],
        HF_ENDPOINT="http://127.0.0.1:9",  # nobody listens there
        HF_HOME=str(cache),
    )
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("Qwen2 demo, 1.0 M parameters, float32 · pydoc topics, held out, CPython 3.")
    assert not cache.exists()

    result = json.loads(out.read_text())
    assert result["tokens"] == 4 * 256
    assert result["off"]["ppl"] < 100  # it has learned something; of 1,024 tokens an untrained one expects them all
    assert abs(result["paired"]["delta_nll"]) <= 1e-4
    assert result["paired"]["top1_agreement"] == 1
    assert result["flash"] == {"calls": {"cpu_prefill": 4}, "fallbacks": {}}
    assert "Same predictions; " in outcome.stdout
