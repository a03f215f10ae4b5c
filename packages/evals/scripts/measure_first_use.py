"""Measures how long the first requests take in a fresh container, patch off and on, in seconds.

    python packages/evals/scripts/measure_first_use.py MODEL

MLX and the patch compile kernels at their first use, and keep what they have compiled. Here each process gets empty
folders in place of these caches. Prints a line of JSON: for each kind of request and arm, the seconds of each process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

CACHES = ("HOME", "TMPDIR", "FLASHATTN_CACHE", "MLX_PTX_CACHE_DIR")
PROCESSES = 2  # of each arm
PROMPTS = {"prompt": 2000, "short prompt": 37}  # tokens
BATCH = (100, 400, 900, 1500)


def main(model: str) -> None:
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"off": [], "on": []})
    for arm in ("off", "on") * PROCESSES:
        with tempfile.TemporaryDirectory() as folder:
            environment = {name: tempfile.mkdtemp(dir=folder) for name in CACHES} | {
                "MLXLM_FLASH": str(int(arm == "on"))
            }
            command = [sys.executable, "-m", "mlxlm_flash_patch", "run", __file__, model, "once"]
            done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
        for request, took in json.loads(done.stdout).items():
            seconds[request][arm].append(took)
    print(json.dumps(seconds))


def once(folder: str) -> dict[str, float]:
    import mlx.core as mx
    from mlx_lm import batch_generate, load
    from mlx_lm.generate import generate_step

    model, tokenizer = load(folder)[:2]
    mx.eval(model.parameters())
    seconds: dict[str, float] = {}
    for request, length in PROMPTS.items():
        prompt = mx.random.randint(0, 1000, (length,))
        start = time.perf_counter()
        steps = generate_step(prompt, model, max_tokens=8)
        next(steps)
        seconds[request] = time.perf_counter() - start
        list(steps)  # the tokens after the first
    start = time.perf_counter()
    batch_generate(model, tokenizer, [[5] * length for length in BATCH], max_tokens=8)
    seconds["batch"] = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    if sys.argv[2:] == ["once"]:
        print(json.dumps(once(sys.argv[1])))
    else:
        main(sys.argv[1])
