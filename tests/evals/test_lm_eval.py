"""For a published model and the same pages, lm-evaluation-harness computes the same perplexity as flash-eval.

`mlx_lm.evaluate` runs the harness with mlx-lm's model, and `lm_eval` runs it with transformers' model. A local hub
serves two datasets of these pages. The harness reads whole pages. flash-eval reads lines, as WikiText's file has them.
"""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.evals.loopback_hub import Repo, dataset, serve

RUN = "uv run --with 'lm-eval[hf]==0.4.13' python -m pytest --all tests/evals/test_lm_eval.py"
pytestmark = [
    pytest.mark.nightly("reads with a model of 135 M parameters"),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason=f"no lm-evaluation-harness: {RUN}"),
]

CONFIG = "wikitext-2-raw-v1"
LOBSTER = (
    "= Homarus gammarus =",
    'The lobster of the eastern Atlantic is blue ; only cooking makes it " lobster red " . It weighs 5 – 6 kilograms '
    "( 11 – 13 lb ) , and the heaviest known weighed 9 @.@ 3 kg . A female carries up to 20 @,@ 000 eggs for a year .",
    "= = Claws = =",
    "They are of two kinds : the crusher and the cutter . Which of the two is which depends on use alone : "
    "lobsters that grow up on a smooth ground have two cutters . In water of 20 ° C the claws ' muscles tire soon .",
    "= = = Colour = = =",
    "The shell 's blue is a protein 's : it bends a red @-@ orange pigment out of shape , and boiling frees it .",
)
PERPLEXITY = (
    "= Perplexity =",
    "The perplexity of a text says among how many equally likely tokens a model hesitates , on average , before each "
    "token that comes . Of N tokens a model that knows nothing has a perplexity of N . Two models can be compared if "
    "both read the same tokens behind the same context ( and if the text is in the training data of neither ) .",
)
# The environment of `uv run --with` can import the package, but does not have the program mlxlm-flash.
MLXLM_FLASH = [sys.executable, "-c", "from mlxlm_flash_patch.cli import main; main()"]
LM_EVAL = [sys.executable, "-m", "lm_eval"]


def lines(page):
    """The lines of a page as in WikiText's file."""
    return [line for paragraph in page for line in (f" {paragraph} \n", " \n")]


def repo(column, rows):
    """A dataset of these rows. The harness asks for all three splits, and reads `test`."""
    return Repo({"0" * 40: dataset({f"{CONFIG}/{split}": {column: rows} for split in ("train", "validation", "test")})})


@pytest.fixture
def hub(tmp_path):
    """Serves both datasets. Returns the environment variables that lead the hub's clients there."""
    pages = "".join(lines(LOBSTER)).removesuffix("\n"), "".join(lines(PERPLEXITY))
    rows = ["" if line.isspace() else line for line in lines(LOBSTER + PERPLEXITY)]
    datasets = {
        ("dataset", "EleutherAI/wikitext_document_level"): repo("page", pages),
        ("dataset", "Salesforce/wikitext"): repo("text", rows),
    }
    with serve(datasets) as hub:
        yield {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf")}


@pytest.fixture
def ours(real_model, in_fresh_process, hub):
    """ours(*rules): the result of `flash-eval perplexity` with the options `rules` on the hub's pages."""

    def run(*rules):
        wikitext = ["--model", real_model, "--dataset", "wikitext", "--documents", "separate", *rules]
        [done] = in_fresh_process(["perplexity", *wikitext, "-o", "json"], **hub)
        assert (done.exit_code, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return run


@pytest.fixture
def theirs(hub, tmp_path):
    """theirs(*command): the harness's results for its task `wikitext`."""

    def run(*command):
        environment = {**os.environ, **hub, "MLXLM_FLASH": "strict"}
        done = subprocess.run(
            [*command, "--tasks", "wikitext"], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        [file] = (file for file in tmp_path.glob("out/**/*") if file.is_file())
        result = json.loads(file.read_text())
        return result.get("results", result)["wikitext"]

    return run


def assert_same(ours, theirs, rel):
    """Compares the figures. For each page, the harness counts two more words than flash-eval."""
    for arm in (ours["off"], ours["on"]):
        assert theirs["bits_per_byte,none"] == pytest.approx(arm["bits_per_byte"], rel=rel)
        assert theirs["byte_perplexity,none"] == pytest.approx(arm["byte_ppl"], rel=rel)
        cost = math.log(theirs["word_perplexity,none"]) * (ours["words"] + 2 * ours["dataset"]["documents"])
        assert cost == pytest.approx(math.log(arm["word_ppl"]) * ours["words"], rel=rel)


def test_mlx_lm_evaluate(real_model, ours, theirs, tmp_path):
    """mlx_lm.evaluate reads each page in one piece, without a prefix. The strict patch makes the command fail if flash
    attention does not take a call.

    A token's loss is about 4 nats. On a CPU, mlx_lm.evaluate computes it 1e-4 too low, because nn.log_softmax adds
    49,152 numbers in float32.
    """
    command = [*MLXLM_FLASH, "run", "mlx_lm.evaluate", "--model", real_model, "--output-dir", tmp_path / "out"]
    assert_same(ours("--bos", "auto", "--context", 1024), theirs(*command), rel=1e-4)


@pytest.mark.skipif(not (find_spec("torch") and find_spec("accelerate")), reason=f"no torch, or no accelerate: {RUN}")
def test_lm_eval(real_model, ours, theirs, tmp_path):
    """lm_eval puts a prefix before each page, and reads the page in windows."""
    arguments = f"pretrained={real_model},max_length=64,dtype=float32,add_bos_token=False"
    model = ("--model", "hf", "--model_args", arguments, "--device", "cpu")
    command = [*LM_EVAL, *model, "--output_path", tmp_path / "out"]
    assert_same(ours("--bos", "always", "--context", 64), theirs(*command), rel=1e-5)
