import threading

import pytest
import torch

from wellcond.numerics.cores import on_cores


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_each_part_takes_one_core_and_results_keep_their_order(three_threads):
    """Otherwise every part would start as many threads as there are cores, and all would wait for each other."""
    met = threading.Barrier(3, timeout=60)

    def call(part: int) -> tuple[int, int, bool]:
        met.wait()  # breaks unless three are side by side
        return part, torch.get_num_threads(), torch.is_grad_enabled()

    assert on_cores(call, range(6)) == [(part, 1, False) for part in range(6)]
    assert torch.get_num_threads() == 3
    assert torch.is_grad_enabled()


def test_no_threads_where_there_is_one_core_or_one_part(three_threads):
    here = threading.get_ident()
    assert on_cores(lambda _: threading.get_ident(), [0]) == [here]
    assert on_cores(lambda _: threading.get_ident(), []) == []
    torch.set_num_threads(1)
    assert on_cores(lambda _: threading.get_ident(), [0, 1]) == [here, here]


def test_an_error_is_raised_and_the_number_of_threads_restored(three_threads):
    with pytest.raises(ZeroDivisionError):
        on_cores(lambda part: 1 / part, [1, 0, 2])
    assert torch.get_num_threads() == 3
