"""One pair of ranks for all tests of equivalence in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pair import RankPair


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPair]:
    """Two gloo ranks; they start with the first call."""
    with RankPair() as made:
        yield made
