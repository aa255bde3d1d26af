"""as_strided by slices and positions equals torch's, for tensors that lie in memory in any order."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vescale_fn.strided import as_strided, as_strided_scatter

BASES = [(4, 6), (2, 3, 4), (24,), (2, 1, 12)]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_the_same_elements_are_taken_and_written(data: st.DataObject) -> None:
    base = torch.arange(24.0).reshape(data.draw(st.sampled_from(BASES)))
    x = base.permute(data.draw(st.permutations(range(base.dim()))))
    x = x[tuple(slice(data.draw(st.integers(0, min(1, n - 1))), None) for n in x.shape)]
    rank = data.draw(st.integers(0, 3))
    size = data.draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    stride = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12, 13, 0]), min_size=rank, max_size=rank))
    offset = data.draw(st.sampled_from([None, 0, 1, 2, 6, 7]))
    args = (size, stride, offset)
    try:
        want = torch.as_strided(x, *args)
    except RuntimeError:
        assume(False)
    taken = want.flatten().tolist()
    assume(set(taken) <= set(x.flatten().tolist()))
    got = as_strided(x, *args)
    assume(got is not NotImplemented)
    assert torch.equal(got, want)
    if len(set(taken)) == len(taken):
        value = -1 - torch.rand(want.shape)
        assert torch.equal(as_strided_scatter(x, value, *args), torch.as_strided_scatter(x, value, *args))
