"""The options of `perplexity` that change the perplexity: windows, scoring, documents, BOS, detokenising."""

from typing import get_args

import click

from flash_evals.commands.options import at_least, grouped
from flash_evals.results.perplexity_result import Documents, Scoring
from flash_evals.work.models import Bos
from flash_evals.work.plan import Rules

options = grouped(
    "rules",
    Rules,
    click.option("--context", default=256, callback=at_least(2), help="Tokens that the model reads in one window."),
    click.option(
        "--stride",
        type=int,
        help="Tokens between the starts of two windows. A stride below the context puts more text before each scored "
        "token, and takes longer.  [default: the context]",
    ),
    click.option(
        "--scoring",
        type=click.Choice(get_args(Scoring)),
        default="rolling",
        help="Which tokens are scored. rolling: each token once, as in lm-evaluation-harness. half: only the second "
        "half of each chunk of --context tokens, as in llama.cpp's llama-perplexity; then there is no "
        "word or byte perplexity.",
    ),
    click.option(
        "--documents",
        type=click.Choice(get_args(Documents)),
        default="joined",
        help="joined: the documents form one text, with a blank line between two (in WikiText, as in its file). "
        "separate: the model reads each document without the others, as in lm-evaluation-harness.",
    ),
    click.option(
        "--bos",
        type=click.Choice(get_args(Bos)),
        default="auto",
        help="Put a BOS token before the text, or each separate document, so that the first token is scored too; with "
        "--scoring half the BOS replaces the first token of each chunk. auto: only if the model's tokenizer adds a "
        "BOS by itself. always: in any case; EOS stands in for a missing BOS, as in lm-evaluation-harness.",
    ),
    click.option(
        "--detokenise/--no-detokenise",
        default=None,
        help="Undo WikiText's tokenisation before the model reads it: `2 @.@ 5 kg ( 6 lb )` becomes `2.5 kg (6 lb)`. "
        "Word and byte perplexity still count the original text.  [default: yes if --dataset names WikiText]",
    ),
)
