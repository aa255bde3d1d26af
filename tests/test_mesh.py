"""Meshes: coordinates and groups against NumPy, and every way to ask for a mesh that cannot be."""

from __future__ import annotations

import math
import socket
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from vescale_fn.mesh import abstract_mesh, make_mesh, print0, process_count, process_index
from vescale_fn.sharding.mesh import Mesh, MeshShape

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda s: MeshShape(("x", "y", "z")[: len(s)], tuple(s))
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> str:
    """torch.distributed initialised as process 1 of a world of 4, without communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield "fake"  # type: ignore[misc]
    dist.destroy_process_group()


@given(SHAPES)
def test_ranks_are_row_major(shape: MeshShape) -> None:
    ranks = np.arange(shape.size).reshape(shape.sizes)
    for r, coords in enumerate(shape.all_coords()):
        assert ranks[tuple(coords.values())] == r == shape.rank(coords)


@given(SHAPES, st.data())
def test_groups_are_the_ranks_along_axes(shape: MeshShape, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.permutations(shape.names)))[: data.draw(st.integers(0, len(shape.names)))]
    order = [*(i for i, a in enumerate(shape.names) if a not in axes), *(shape.names.index(a) for a in axes)]
    ranks = np.arange(shape.size).reshape(shape.sizes).transpose(order).reshape(-1, shape.extent(axes))
    assert sorted(shape.groups(axes)) == sorted(map(tuple, ranks.tolist()))


@given(SHAPES, st.data())
def test_a_sub_mesh_holds_the_ranks_at_its_coordinates(shape: MeshShape, data: st.DataObject) -> None:
    mesh = Mesh(shape, devices=tuple(f"cpu:{i}" for i in range(shape.size)))
    axis = data.draw(st.sampled_from(shape.names))
    c = data.draw(st.integers(0, shape[axis] - 1))
    sub = mesh.at(**{axis: c})
    assert sub.axis_names == tuple(a for a in shape.names if a != axis)
    whole = np.arange(shape.size).reshape(shape.sizes).take(c, axis=shape.names.index(axis)).reshape(-1)
    assert [sub.device_of(r) for r in range(sub.size)] == [f"cpu:{r}" for r in whole]


def test_sub_meshes_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"^Mesh.at: there is no pp=2 on the mesh pp=2,tp=2\.$"):
        make_mesh(pp=2, tp=2).at(pp=2)
    with pytest.raises(ValueError, match=r"^Mesh.at: there is no dp=0 on the mesh pp=2,tp=2\.$"):
        make_mesh(pp=2, tp=2).at(dp=0)
    with pytest.raises(ValueError, match=r"lies over 2 processes, and has no sub-meshes\.$"):
        Mesh(MeshShape(("pp",), (2,)), "torchdist", processes=2).at(pp=0)


def test_virtual_meshes() -> None:
    mesh = make_mesh(dp=2, tp=4)
    assert mesh == Mesh(MeshShape(("dp", "tp"), (2, 4)), "virtual", "cpu")
    assert list(mesh.local_ranks) == list(range(8))
    assert mesh.device_of(5) == "cpu"
    assert make_mesh(dp=2, processes=1).kind == "virtual"
    assert make_mesh(dp=2, device="meta").device_of(1) == "meta"
    assert (process_index(), process_count()) == (0, 1)


def test_abstract_meshes_hold_no_ranks() -> None:
    mesh = abstract_mesh(dp=2048, tp=8)
    assert (mesh.size, mesh.kind, len(mesh.local_ranks)) == (16384, "abstract", 0)
    with pytest.raises(ValueError, match=r"^abstract_mesh: dp=-1 has a -1, but there is no world to fill it from\."):
        abstract_mesh(dp=-1)


def test_meshes_over_a_world(world: str) -> None:
    assert make_mesh(dp=2, tp=2) == Mesh(MeshShape(("dp", "tp"), (2, 2)), "torchdist", "cpu", (), 4, 1)
    assert make_mesh(dp=-1, tp=2).shape.sizes == (2, 2)
    assert make_mesh(dp=-1).axis_rank("dp") == 1
    several = make_mesh(dp=8, processes=4)
    assert list(several.local_ranks) == [2, 3]
    assert (process_index(), process_count()) == (1, 4)


def test_under_torchrun_the_world_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="dp=2 has 2 ranks, but the world has 1 process"):
        make_mesh(dp=2)
    assert not dist.is_initialized()  # a mesh that cannot be does not start anything
    try:
        assert make_mesh(dp=-1, device="cpu") == Mesh(MeshShape(("dp",), (1,)), "torchdist", "cpu")
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_print0_prints_on_process_0_only(world: str, capsys: pytest.CaptureFixture[str]) -> None:
    print0("hello")
    assert capsys.readouterr().out == ""


def test_print0_without_a_world(capsys: pytest.CaptureFixture[str]) -> None:
    print0("a", "b", sep="-")
    assert capsys.readouterr().out == "a-b\n"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"dp": 8},
            "make_mesh: dp=8 has 8 ranks, but the world has 4 process(es). Start 8 processes, or pass processes=4 to "
            "let each hold 2.",
        ),
        ({"dp": 6}, "make_mesh: dp=6 has 6 ranks, but the world has 4 process(es). Start 6 processes."),
        (
            {"dp": 2},
            "make_mesh: dp=2 has 2 ranks, but the world has 4 processes, and every process must hold a rank. Give one "
            "axis the size -1 to use all of them.",
        ),
        (
            {"dp": -1, "tp": 3},
            "make_mesh: dp=-1, tp=3 cannot be filled: the world has 4 processes, not a multiple of 3.",
        ),
        (
            {"dp": 6, "processes": 4},
            "make_mesh: dp=6 has 6 ranks, which 4 processes cannot share equally. Make the number of ranks a multiple "
            "of the number of processes.",
        ),
        (
            {"dp": 8, "processes": 2},
            "make_mesh: processes=2, but torch.distributed has a world of 4 processes. Leave processes out, or start 2 "
            "processes.",
        ),
        (
            {"dp": -1, "processes": 4},
            "make_mesh: with processes=4 the number of ranks is open, so dp=-1 needs all sizes.",
        ),
    ],
)
def test_meshes_that_do_not_fit_the_world(world: str, axes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as e:
        make_mesh(**axes)  # type: ignore[arg-type]
    assert str(e.value) == message


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "make_mesh: a mesh has at least one axis, for example make_mesh(dp=2)."),
        ({"dp": 0}, "make_mesh: axis dp=0 needs a positive size, or -1 for what is left."),
        ({"dp": 2.0}, "make_mesh: axis dp=2.0 needs a positive size, or -1 for what is left."),
        ({"dp": -1, "tp": -1}, "make_mesh: dp=-1, tp=-1 leaves dp and tp open. Only one axis may be -1."),
        ({"_x": 2}, "make_mesh: the axis name '_x' must start with a letter, so that specs can name it."),
        (
            {"dp": -1},
            "make_mesh: dp=-1 has a -1, which the number of processes fills, but torch.distributed is not initialised. "
            "Give all sizes for virtual devices, or start the program with torchrun.",
        ),
        (
            {"dp": 4, "processes": 2},
            "make_mesh: processes=2, but torch.distributed is not initialised. Start the program with: torchrun "
            "--nproc-per-node 2 train.py",
        ),
    ],
)
def test_meshes_that_cannot_be(axes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(ValueError) as e:
        make_mesh(**axes)  # type: ignore[arg-type]
    assert str(e.value) == message


def test_gpus_without_torchrun_are_pointed_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert make_mesh(dp=2).device == "cpu"
    assert capsys.readouterr().out == (
        "make_mesh: 4 GPU(s) seen, but this is one process with 2 virtual ranks. Use them by: torchrun "
        "--nproc-per-node 2 train.py\n"
    )
    mesh = make_mesh(dp=8, device="cuda")
    assert [mesh.device_of(r) for r in range(5)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0"]
    assert make_mesh(dp=2, device="cuda:1").device_of(0) == "cuda:1"
    assert math.prod(mesh.shape.sizes) == 8
    assert capsys.readouterr().out == ""
