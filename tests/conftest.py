"""What every test shares: one thread, a fixed seed, and no GPU tests where there is no GPU."""

import pytest
import torch

# torch warns at the first product of a process that is computed in the thread of backward, whoever asks for it.
FIRST_PRODUCT = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark = FIRST_PRODUCT if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
