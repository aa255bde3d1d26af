"""Making Arrays: device_put, callbacks, and a process's own rows."""

from __future__ import annotations

import itertools

import array_tasks as tasks
import numpy as np
import pytest
import torch
from worker_pool import Pool

import vescale_fn as vf
from vescale_fn.array import Array
from vescale_fn.placement import cut
from vescale_fn.sharding.bind import bind

MESH = vf.make_mesh(dp=2, tp=2)


def grid(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


# ---- device_put


def test_trees_of_anything() -> None:
    tree = {"w": grid(4, 2), "none": None, "list": [1, 2.5, True], "np": np.ones(3), "empty": {}}
    out = vf.device_put(tree, {"w": "d f/tp", "none": None, "list": "", "np": "b", "empty": {}}, MESH)
    assert out["none"] is None
    assert out["empty"] == {}
    assert torch.equal(out["w"].full(), tree["w"])
    assert [x.item() for x in out["list"]] == [1, 2.5, True]
    assert [x.dtype for x in out["list"]] == [torch.int64, torch.float32, torch.bool]
    assert out["np"].dtype == torch.float64


def test_an_empty_tree_needs_a_mesh_only() -> None:
    assert vf.device_put({}, None, MESH) == {}
    assert vf.device_put(None, None, MESH) is None


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 2)])
@pytest.mark.parametrize("spec", ["b/dp d", "b d/tp", "b~/dp d", "b d {sum: tp}", "b d {max: tp}"])
def test_zero_sizes_and_states(shape: tuple[int, int], spec: str) -> None:
    x = -1 - grid(*shape)
    assert torch.equal(vf.device_put(x, spec, MESH).full(), x)


def test_inputs_are_copied_not_kept() -> None:
    x = grid(4, 4)
    a = vf.device_put(x, "b d", MESH)
    x.zero_()
    assert torch.equal(a.full(), grid(4, 4))
    b = vf.device_put(a)
    vf.pjit(lambda a: a + 1, donate_argnums=0)(a)
    assert torch.equal(b.full(), grid(4, 4))


def test_may_alias_keeps_memory_and_donation_respects_it() -> None:
    a = vf.device_put(grid(4, 4), "b/dp d", MESH)
    b = vf.device_put(a, "b/dp d", may_alias=True)
    assert b.shards[0] is a.shards[0]
    state = {"w": b, "m": vf.device_put(grid(4, 4), "b/dp d", MESH)}
    vf.pjit(lambda s: {"w": s["w"] + s["m"], "m": s["m"]}, donate_argnums=0)(state)
    assert torch.equal(a.full(), grid(4, 4))


def test_strided_tensors_and_parameters() -> None:
    w = torch.nn.Parameter(grid(4, 6).t())
    a = vf.device_put(w, "d/tp f", MESH)
    assert torch.equal(a.full(), w.detach())
    assert not any(s.requires_grad for s in a.shards)
    assert all(s.is_contiguous() for s in a.shards)


@pytest.mark.parametrize(
    ("before", "after"), itertools.product(["b d", "b/dp d", "b/(tp dp) d", "b d {sum: tp}", "(2 b/tp) d/dp"], repeat=2)
)
def test_arrays_are_moved(before: str, after: str) -> None:
    x = grid(8, 4)
    moved = vf.device_put(vf.device_put(x, before, MESH), after)
    assert torch.equal(moved.full(), x)
    for shard in moved.addressable_shards:
        if "{" not in after:
            assert torch.equal(shard.data, cut(x, bind(after, (8, 4), MESH.shape), shard.coords))


def test_arrays_move_to_another_mesh() -> None:
    a = vf.device_put(grid(8, 4), "b/dp d", MESH)
    other = vf.make_mesh(x=4)
    b = vf.device_put(a, "b/x d", other)
    assert b.mesh == other
    assert torch.equal(b.full(), grid(8, 4))


def test_no_spec_keeps_whole_and_a_named_sharding_brings_its_mesh() -> None:
    assert vf.device_put(grid(2), None, MESH).layout.is_whole
    assert vf.device_put(grid(2), vf.NamedSharding(MESH, "b/dp")).mesh == MESH


def test_axes_of_size_one_are_free() -> None:
    mesh = vf.make_mesh(dp=1, tp=2)
    a = vf.device_put(grid(3, 4), "b/dp d/tp", mesh)
    assert [s.data.shape for s in a.addressable_shards] == [(3, 2), (3, 2)]


def test_factor_sizes_by_keyword_and_inline() -> None:
    a = vf.device_put(grid(2, 24), "d (qkv h/tp k)", MESH, qkv=3, h=4)
    b = vf.device_put(grid(2, 24), "d (qkv=3 h=4/tp k)", MESH)
    assert a.type == b.type
    assert str(a.sharding.spec) == "d (qkv=3 h=4/tp k)"


# ---- callbacks


@pytest.mark.parametrize("spec", ["b/dp d/tp", "b d", "b~/(dp tp) d", "b/tp d {sum: dp}"])
def test_callbacks_give_parts(spec: str) -> None:
    x, asked = grid(6, 4), []

    def part(index: tuple[slice, ...]) -> torch.Tensor:
        asked.append(index)
        return x[index]

    a = vf.make_array_from_callback((6, 4), spec, MESH, part)
    assert torch.equal(a.full(), x)
    assert a.type == vf.device_put(x, spec, MESH).type
    assert len(asked) == len({str(i) for i in asked})  # one call for each distinct part


def test_empty_parts_have_an_index_too() -> None:
    a = vf.make_array_from_callback((1, 2), "b~/dp d", MESH, lambda i: grid(1, 2)[i])
    assert torch.equal(a.full(), grid(1, 2))


def test_callbacks_that_return_another_shape() -> None:
    with pytest.raises(ValueError) as e:
        vf.make_array_from_callback((4,), "b/dp", MESH, lambda i: torch.ones(3))
    assert str(e.value) == (
        "vf.make_array_from_callback: the callback returned shape [3] for index (slice(0, 2, None),), which holds [2]. "
        "Return exactly that part of the value."
    )


def test_callbacks_for_strided_parts() -> None:
    with pytest.raises(ValueError) as e:
        vf.make_array_from_callback((8,), "(2 b/dp)", MESH, lambda i: torch.ones(3))
    assert str(e.value) == (
        "vf.make_array_from_callback: spec '(2 b/dp)' gives a rank several runs of one dim, which one slice cannot "
        "say. Make the Array with a contiguous spec, then move it with vf.device_put(x, spec)."
    )


def test_callbacks_on_an_abstract_mesh() -> None:
    with pytest.raises(ValueError) as e:
        vf.make_array_from_callback((8,), "b/dp", vf.abstract_mesh(dp=2), lambda i: torch.ones(4))
    assert str(e.value) == (
        "vf.make_array_from_callback: mesh dp=2 is abstract and holds no parts. Use vf.device_put with a vf.ShapeDtype."
    )


# ---- a process's own rows


def own_rows(mesh: vf.Mesh, value: torch.Tensor, spec: str) -> torch.Tensor:
    """What the process of a mesh holds of a value, by the definition of its ranks' parts."""
    layout = bind(spec, tuple(value.shape), mesh.shape)
    out = value
    for dim in range(value.ndim):
        runs = [run for r in mesh.local_ranks for run in layout.intervals(dim, mesh.shape.coords(r))]
        held = sorted({i for a, b in runs for i in range(a, b)})
        out = out.index_select(dim, torch.tensor(held, dtype=torch.int64))
    return out


@pytest.mark.parametrize("spec", ["b/dp d", "b/(dp tp) d", "b/tp d/dp", "b d", "(2 b/dp) d/tp", "b/dp d {sum: tp}"])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_process_gives_its_own_rows(spec: str, processes: int) -> None:
    value = grid(8, 4)
    for process in range(processes):
        mesh = vf.Mesh(MESH.shape, "torchdist", processes=processes, process=process)
        a = vf.local_put(own_rows(mesh, value, spec), spec, mesh)
        assert tuple(a.shape) == (8, 4)
        for rank, shard in zip(mesh.local_ranks, a.shards, strict=True):
            assert torch.equal(shard, cut(value, a.layout, mesh.shape.coords(rank)))


def test_rows_without_elements() -> None:
    mesh = vf.Mesh(MESH.shape, "torchdist", processes=2, process=1)
    assert tuple(vf.local_put(torch.ones(0, 3), "b/dp d", mesh).shape) == (0, 3)


def test_trees_of_rows_with_rules() -> None:
    tree = {"x": grid(4, 2), "y": grid(4)}
    out = vf.local_put(tree, vf.rules({"x": "b/dp d", "y": "b/dp"}), MESH)
    assert isinstance(out["x"], Array)
    assert torch.equal(out["y"].full(), tree["y"])


def test_processes_without_a_block() -> None:
    mesh = vf.Mesh(vf.make_mesh(x=3, y=2).shape, "torchdist", processes=2)
    with pytest.raises(ValueError) as e:
        vf.local_put(torch.ones(4, 4), "a/x b/y", mesh)
    assert str(e.value) == (
        "vf.local_put: the ranks of mesh x=3,y=2 that one of 2 processes holds have no block of the value. "
        "Use vf.make_array_from_callback, which asks for the part of each rank."
    )


def test_process_local_data_takes_a_sharding_first() -> None:
    a = vf.make_array_from_process_local_data(vf.NamedSharding(MESH, "b/dp d"), grid(4, 2))
    assert torch.equal(a.full(), grid(4, 2))
    b = vf.make_array_from_process_local_data("b/dp d", grid(4, 2), MESH)
    assert a.type == b.type


@pytest.mark.parametrize("spec", ["b/dp d", "b d/dp", "b d"])
def test_two_processes_build_one_array(pool: Pool, spec: str) -> None:
    for (full, printed, shape), process in zip(pool.run(tasks.own_rows_make_an_array, spec), range(2)):
        assert full == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]], process
        assert shape == [4, 2]
        assert printed.startswith("Array(f32[4, 2]")


def test_two_processes_put_and_call_back(pool: Pool) -> None:
    for held, full, back in pool.run(tasks.every_way_to_make_an_array):
        assert held
        assert full == back == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
