"""Arrays as DTensors and back, on real processes."""

from __future__ import annotations

import array_tasks as tasks
import pytest
import torch
from worker_pool import Pool

import vescale_fn as vf

VALUE = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


@pytest.mark.parametrize(
    ("spec", "placement"),
    [("b/dp d", "Shard(dim=0)"), ("b d/dp", "Shard(dim=1)"), ("b d", "Replicate()"), ("b d {sum: dp}", "Partial(sum)")],
)
def test_there_and_back_without_a_copy(pool: Pool, spec: str, placement: str) -> None:
    for placements, shared, full, back, same_type in pool.run(tasks.to_dtensor_and_back, spec):
        assert placements == f"({placement},)"
        assert shared
        assert full == back == VALUE
        assert same_type


def test_dtensors_from_elsewhere(pool: Pool) -> None:
    for sharding, full, said in pool.run(tasks.from_a_foreign_dtensor):
        assert sharding == "NamedSharding(dp=2,tp=1: 'a/dp b')"
        assert full == VALUE
        assert said == [
            f"from_dtensor: the DTensor lives on a mesh of shape [2, 1] with axes ('dp', 'tp'), not on {mesh}. "
            "Pass a mesh with the same axes."
            for mesh in ("x=2,y=1", "dp=2")
        ]


def test_virtual_ranks_have_no_dtensor() -> None:
    with pytest.raises(ValueError) as e:
        vf.device_put(torch.ones(4), "b/dp", vf.make_mesh(dp=2)).to_dtensor()
    assert str(e.value) == (
        "to_dtensor: the Array (f32[4] 'a/dp' on dp=2) has 2 ranks on a virtual mesh with 1 process(es), and a DTensor "
        "needs one process per rank. Run under torchrun."
    )
