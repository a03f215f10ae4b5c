"""Runs the models of a script with flash attention or without: `python SCRIPT on|off FOLDER`.

"on" and "off" need two processes, because a compiled function keeps the attention that it was compiled with. A script
passes its cases to main(). A case is a function that builds a small random model and returns a function to run. The
results of a case go to FOLDER/CASE.npz. The kernels that ran and the calls that fell back go to stdout, as JSON.
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
        save(run, folder / case.__name__)
        return {}
    import mlxlm_flash_patch as flash  # imported here, because with "off" nothing may import it

    flash.enable()
    save(run, folder / case.__name__)
    status = flash.status()
    flash.disable()
    return {"kernels": dict(status.calls), "fallbacks": dict(status.fallbacks)}


def save(run, path):
    """Writes the arrays that run() returns."""
    mx.savez(str(path), **dict(tree_flatten({"result": run()})))
