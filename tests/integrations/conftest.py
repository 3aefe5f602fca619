"""What tests with other people's trainers share: nothing of one run is left for the next."""

import pytest


@pytest.fixture(autouse=True)
def _alone(nothing_left: None) -> None:
    """For every test of this folder."""
