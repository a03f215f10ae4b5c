"""A score depends on the model and the text: not on the run, the batch, the order or the company of other windows."""

from collections.abc import Sequence

import numpy as np
import pytest
from flash_evals import models, paired
from flash_evals.models import LoadedModel
from flash_evals.scoring import Window, windows


def scores(loaded: LoadedModel, ids: np.ndarray, plan: Sequence[Window], batch_size: int) -> dict[str, np.ndarray]:
    batches = list(paired.measured(loaded.model, ids, plan, batch_size))
    assert sum(batch.windows for batch in batches) == len(plan)
    found = {arm: np.concatenate([batch.scores[arm].nll for batch in batches]) for arm in ("off", "on")}
    return {**found, "kl": np.concatenate([batch.kl for batch in batches])}


@pytest.fixture
def ids(loaded: LoadedModel, text: str) -> np.ndarray:
    return models.encode(loaded, text).ids


@pytest.mark.parametrize("stride", [24, 10])
def test_twice_the_same_bit_for_bit(loaded: LoadedModel, ids: np.ndarray, stride: int) -> None:
    plan = windows(len(ids), 24, stride)
    first, second = (scores(loaded, ids, plan, 3) for _ in range(2))
    for name in ("off", "on", "kl"):
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("stride", [24, 10])
def test_the_batch_size_changes_no_score(loaded: LoadedModel, ids: np.ndarray, stride: int) -> None:
    """Within 1e-5 per token: a matrix product may sum in another order when it has more rows."""
    plan = windows(len(ids), 24, stride)
    one = scores(loaded, ids, plan, 1)
    for batch_size in (2, 5, len(plan), 10 * len(plan)):
        other = scores(loaded, ids, plan, batch_size)
        for arm in ("off", "on"):
            np.testing.assert_allclose(other[arm], one[arm], atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_order_of_the_windows_changes_no_score(loaded: LoadedModel, ids: np.ndarray, batch_size: int) -> None:
    """Bit for bit: the same windows in batches of the same size, which begin and end elsewhere."""
    plan = windows(len(ids), 24, 8)
    plan = plan[: len(plan) // batch_size * batch_size]
    forwards, backwards = scores(loaded, ids, plan, batch_size), scores(loaded, ids, plan[::-1], batch_size)
    ends = np.cumsum([window.end + 1 - window.first_scored for window in plan])[:-1]
    for name in ("off", "on", "kl"):
        back = np.concatenate(np.split(backwards[name], len(backwards[name]) - ends[::-1])[::-1])
        np.testing.assert_array_equal(back, forwards[name])
