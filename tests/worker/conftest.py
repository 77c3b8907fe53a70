import pytest
import torch
from tiny_llama import TinyLlama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> TinyLlama:
    return TinyLlama.save(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """A model this small only waits for the second thread: ten times longer a step while others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
