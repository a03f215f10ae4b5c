"""Runs the models of a script with flash attention or without: `python SCRIPT on|off FOLDER`.

"on" and "off" need two processes, because a compiled function keeps the attention that it was compiled with. A script
passes its cases to main(). A case is a function that builds a small random model and returns a function to run. The
results of a case go to FOLDER/CASE.npz. The kernels that ran, the calls that fell back and the peak memory go to
stdout, as JSON.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten


def main(*cases):
    arm, folder = sys.argv[1], Path(sys.argv[2])
    json.dump({case.__name__: measured(case, arm, folder) for case in cases}, sys.stdout)


def measured(case, arm, folder):
    mx.random.seed(0)
    run = case()
    if arm == "off":
        return {"peak": save(run, folder / case.__name__)}
    import mlxlm_flash_patch as flash  # imported here, because with "off" nothing may import it

    flash.enable()
    peak = save(run, folder / case.__name__)
    status = flash.status()
    flash.disable()
    return {"peak": peak, "kernels": dict(status.calls), "fallbacks": dict(status.fallbacks)}


def save(run, path):
    """Writes the arrays that run() returns. Returns the peak memory of run() in bytes, less what was in use before."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    arrays = dict(tree_flatten({"result": run()}))
    mx.eval(arrays)
    peak = mx.get_peak_memory() - before
    mx.savez(str(path), **arrays)
    return peak
