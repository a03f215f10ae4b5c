"""Asks the hub which commit a branch, tag or commit name means, and turns errors of the hub into messages.

This module asks once, for up to five seconds. Libraries that download would retry for half a minute.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import click

from flash_evals.results.errors import EvalError, one_line

Kind = Literal["model", "dataset"]
INSTEAD: dict[Kind, str] = {"model": "--model FOLDER", "dataset": "--dataset FILE.txt"}  # these need no hub


@contextmanager
def reading(repo: str, kind: Kind, revision: str | None) -> Iterator[tuple[str | None, bool]]:
    """Yields the commit of the repository's `revision` (None: "main"), and whether the hub answered. If the hub did not
    answer, the commit is the one in the cache.

    Raises EvalError if the hub shows this user no such commit, and for errors inside the `with` block. If the hub does
    not answer and the cache lacks the commit, the message names two commands that need no network.
    """
    from huggingface_hub import HfApi, errors, snapshot_download
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars

    set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        disable_progress_bars()
    online, what = True, f"{kind} {repo}"
    try:
        try:
            commit = HfApi().repo_info(repo, repo_type=kind, revision=revision or "main", timeout=5).sha
        except (errors.HFValidationError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except Exception:
            # The client raises many classes of error if it cannot reach the hub: for a refused connection, a timeout,
            # a missing host and so on. In all these cases, the cache can still be read.
            online = False
            found = snapshot_download(repo, repo_type=kind, revision=revision, local_files_only=True, allow_patterns=[])
            commit = Path(found).name
        yield commit, online
    except Exception as error:
        if not online and isinstance(error, errors.LocalEntryNotFoundError | ConnectionError):
            command = f"flash-eval {click.get_current_context().info_name}"
            says = (
                f"{what}{f' at revision {revision}' if revision else ''} is neither a local path nor in the cache, and "
                f"the hub cannot be reached; without a network use `{command}` or `{command} {INSTEAD[kind]}`"
            )
        elif isinstance(error, errors.RevisionNotFoundError):
            says = f"the {what} on the hub has no branch, tag or commit {revision!r}"
        elif isinstance(error, errors.HFValidationError):
            says = f"no such {'model folder' if kind == 'model' else 'file'}: {repo}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            says = f"no file or folder {repo!r}, and the hub shows you no {what}; if it is private, run: hf auth login"
        else:
            how = "" if online else " without a network"
            says = f"cannot read {what}{how}: {one_line(error)}"
        raise EvalError(says) from error
