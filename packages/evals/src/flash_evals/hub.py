"""The hub: is it there, which commit is meant, and what its answers and its silence mean.

It is asked once and briefly, before the libraries that would retry for half a minute.
"""

import re
import sys
from pathlib import Path
from typing import Literal

import click

from flash_evals.errors import EvalError, first_line

ANSWER_WITHIN = 5.0  # seconds; on a network that answers at all, it answers well within this

Kind = Literal["model", "dataset"]


def commit(repo: str, kind: Kind, revision: str | None) -> str | None:
    """The commit that a branch, tag or commit of a repository is, "main" if None; None if the hub cannot be reached.

    Raises EvalError if the hub answers that there is no such repository for this user, or no such revision in it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return HfApi().repo_info(repo, repo_type=kind, revision=revision or "main", timeout=ANSWER_WITHIN).sha
    except HFValidationError as error:
        raise EvalError(f"{repo!r} is neither a local path nor a hub id: {first_line(error)}") from error
    except RevisionNotFoundError as error:
        raise EvalError(f"the {kind} {repo} on the hub has no branch, tag or commit {revision!r}") from error
    except GatedRepoError as error:
        raise gated(repo, kind) from error
    except RepositoryNotFoundError as error:
        raise EvalError(
            f"no file or folder {repo!r} here, and the hub has no {kind} of that name; for a private one: hf auth login"
        ) from error
    except Exception:
        # Refused, timed out, no such host, a proxy's error page: the client has a class for each, and all
        # mean the same here. What the cache holds is still good.
        return None


def last_known_commit(repo: str, kind: Kind, revision: str | None) -> str | None:
    """What `commit` was when something of that revision was last downloaded; None if nothing was."""
    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    ref = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type=kind), "refs", revision or "main")
    return ref.read_text().strip() if ref.is_file() else None


def quiet() -> None:
    """The hub's client says nothing but errors, and draws no bars where nobody watches."""
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars

    set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        disable_progress_bars()


def gated(repo: str, kind: Kind) -> EvalError:
    return EvalError(f"the hub asks you to log in and accept the terms of {kind} {repo}: hf auth login")


def nothing_cached(repo: str, kind: Kind, revision: str | None, instead: str) -> EvalError:
    """No network, nothing in the cache: the error that names two commands which work without either."""
    context = click.get_current_context(silent=True)
    command = f"flash-eval {context.info_name if context else 'perplexity'}"
    what = f"{kind} {repo}" + (f" at revision {revision}" if revision else "")
    return EvalError(
        f"{what} is neither a local path nor in the cache, and the hub cannot be reached; "
        f"without a network use `{command}` or `{command} {instead}`"
    )
