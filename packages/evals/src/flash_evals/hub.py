"""Is the hub there? Asked once, with a short time limit, before the libraries that would retry for half a minute."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

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
        # Refused, timed out, no such host, a proxy's error page: each client version has its own classes for it,
        # and all mean the same here. What the cache holds is still good.
        return None


@contextmanager
def offline() -> Iterator[None]:
    """The hub's libraries read their caches only, and do not wait for a network that is not there.

    Their switch is an environment variable that they read when they are imported; this sets what it sets.
    """
    import datasets  # type: ignore[import-untyped]
    import huggingface_hub.constants

    settings = (huggingface_hub.constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in settings]
    for module in settings:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


def nothing_cached(what: str, *commands: str) -> EvalError:
    """No network, nothing in the cache: the error that names commands which work without either."""
    works = " or ".join(f"`{command}`" for command in commands)
    return EvalError(f"{what} is not in the cache and the hub cannot be reached; without a network use {works}")
