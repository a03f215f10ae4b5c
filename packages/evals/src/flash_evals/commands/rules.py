"""The options of `perplexity` that decide what it is of: windows, their scoring, documents, BOS, detokenising."""

from typing import get_args

import click

from flash_evals.commands.options import at_least, grouped
from flash_evals.results.perplexity_result import Documents, Scoring
from flash_evals.work.models import Bos
from flash_evals.work.plan import Rules

options = grouped(
    "rules",
    Rules,
    click.option("--context", default=256, callback=at_least(2), help="Tokens the model reads in one window."),
    click.option(
        "--stride",
        type=int,
        help="Tokens from one window to the next. A stride below the context gives tokens more text before them, and "
        "takes longer.  [default: the context]",
    ),
    click.option(
        "--scoring",
        type=click.Choice(get_args(Scoring)),
        default="rolling",
        help="rolling: each token once, as lm-evaluation-harness does it. half: chunks of --context tokens, and only "
        "the second half of each, as llama.cpp's llama-perplexity does it. What words and bytes cost is then "
        "not known.",
    ),
    click.option(
        "--documents",
        type=click.Choice(get_args(Documents)),
        default="joined",
        help="joined: one text, with a blank line between two documents (the pages of WikiText: as in its file). "
        "separate: each by itself, with none of the others as context, as lm-evaluation-harness does it.",
    ),
    click.option(
        "--bos",
        type=click.Choice(get_args(Bos)),
        default="auto",
        help="A token in front of the text, or of each separate document, so that its first token is scored too; in "
        "the chunks of --scoring half it replaces the first. auto: if the model's tokenizer sets one by itself. "
        "always: BOS, or EOS where there is none, as lm-evaluation-harness does it.",
    ),
    click.option(
        "--detokenise/--no-detokenise",
        default=None,
        help="Let the model read WikiText as people write: `2.5 kg (6 lb), ` for ` 2 @.@ 5 kg ( 6 lb ) , `. Words and "
        "bytes remain those of the original.  [default: if --dataset is WikiText by its name]",
    ),
)
