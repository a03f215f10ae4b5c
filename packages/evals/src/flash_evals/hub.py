"""Is the hub there? Asked once and briefly, before the libraries that would retry for half a minute."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import click

from flash_evals.errors import EvalError, first_line

ANSWER_WITHIN = 5.0  # seconds; on a network that answers at all, it answers well within this


def revision(repo: str, kind: Literal["model", "dataset"]) -> str | None:
    """The commit that `main` of a repository stands at, or None if the hub cannot be reached.

    Raises EvalError if the hub answers that there is no such repository for this user.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return HfApi().repo_info(repo, repo_type=kind, revision="main", timeout=ANSWER_WITHIN).sha
    except HFValidationError as error:
        raise EvalError(f"{repo!r} is neither a local path nor a hub id: {first_line(error)}") from error
    except GatedRepoError as error:
        raise EvalError(f"the hub asks you to log in and accept the terms of {kind} {repo}: hf auth login") from error
    except RepositoryNotFoundError as error:
        raise EvalError(f"no folder {repo!r} here, and the hub has no {kind} of that name") from error
    except Exception:
        # Refused, timed out, no such host, a proxy's error page: the client has a class for each, and all
        # mean the same here. What the cache holds is still good.
        return None


def quiet() -> None:
    """The hub's client says nothing but errors, and draws no bars where nobody watches."""
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars

    set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        disable_progress_bars()


@contextmanager
def offline() -> Iterator[None]:
    """The hub's libraries read their caches only, and do not wait for a network that is not there.

    Their switch is an environment variable that they read when they are imported; this sets what it sets.
    """
    import datasets  # type: ignore[import-untyped]
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def nothing_cached(what: str, instead: str) -> EvalError:
    """No network, nothing in the cache: the error that names two commands which work without either."""
    context = click.get_current_context(silent=True)
    command = f"flash-eval {context.info_name if context else 'perplexity'}"
    return EvalError(
        f"{what} is neither a local path nor in the cache, and the hub cannot be reached; "
        f"without a network use `{command}` or `{command} {instead}`"
    )
