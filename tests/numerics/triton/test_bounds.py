"""The watch over addresses (tests/bounds.py) notices a kernel that goes astray."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU notices by itself, and is lost then")


@triton.jit
def copy_kernel(x, out, n, READ: tl.constexpr, WRITTEN: tl.constexpr):
    i = tl.arange(0, READ)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < WRITTEN)


def test_what_lies_inside_passes():
    x, out = torch.arange(5.0), torch.zeros(5)
    copy_kernel[(1,)](x, out, 5, READ=8, WRITTEN=5)
    assert torch.equal(x, out)


def test_a_part_of_a_tensor_may_reach_as_far_as_its_storage():
    x, out = torch.arange(8.0), torch.zeros(8)
    copy_kernel[(1,)](x[:3], out[:3], 8, READ=8, WRITTEN=8)
    assert torch.equal(x, out)


@pytest.mark.parametrize(("n", "written", "what"), [(6, 5, "load"), (5, 6, "store")])
def test_one_number_too_far_is_noticed(n, written, what):
    with pytest.raises(Exception, match=f"to {what} lie outside, the first 0 bytes past a tensor"):
        copy_kernel[(1,)](torch.arange(5.0), torch.zeros(5), n, READ=8, WRITTEN=written)
