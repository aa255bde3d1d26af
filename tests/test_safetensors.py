"""safetensors files: those of the package of that name, of which a rank reads only its slices."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_tasks as tasks
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from worker_pool import Pool

import vescale_fn as vf
from vescale_fn.array import ArrayType
from vescale_fn.checkpoint.safetensors import DTYPES, blocks

MESH = vf.make_mesh(dp=2, tp=2)


def said(fn: Callable[[], Any]) -> str:
    with pytest.raises(vf.CheckpointError) as e:
        fn()
    return str(e.value)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape of a tensor, and start and shape of a box in it."""
    whole = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    start = tuple(draw(st.integers(0, n - 1)) for n in whole)
    return whole, start, tuple(draw(st.integers(1, n - a)) for n, a in zip(whole, start))


@given(cuts(), st.integers(0, 40), st.sampled_from([8, 64, 8 << 20]))
def test_blocks_are_the_bytes_of_a_box(cut: Any, gap: int, size: int) -> None:
    whole, start, shape = cut
    values = np.arange(int(np.prod(whole)), dtype=np.uint8 if np.prod(whole) < 256 else np.int16).reshape(whole)
    data, itemsize = values.tobytes(), values.dtype.itemsize
    seen = np.zeros(whole, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_fn.checkpoint.buffer.SIZE", size)
        for b in blocks(whole, start, shape, itemsize, gap):
            at = tuple(slice(a, a + n) for a, n in zip(b.start, b.shape))
            assert b"".join(data[i : i + b.size] for i in b.at) == values[at].tobytes()
            seen[at] += 1
    assert seen.max() == 1
    assert (seen[tuple(slice(a, a + n) for a, n in zip(start, shape))] == 1).all()
    assert gap or seen.sum() == np.prod(shape)


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    w = torch.randn(8, 12)
    values = {str(d): torch.arange(6).view(2, 3).to(d) for d in DTYPES.values()}
    tree = {
        "layers": [
            {"w": vf.device_put(w, "(q a/dp) b/tp", MESH, q=2)},
            {"w": vf.device_put(w, "(a b)~[1 3]/dp", MESH)},
        ],
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(2.5),
        **values,
    }
    file = tmp_path / "new" / "model.safetensors"
    vf.save_safetensors(file, tree, metadata={"format": "pt"})
    got = library.load_file(file)
    assert torch.equal(got.pop("layers.0.w"), w)
    assert torch.equal(got.pop("layers.1.w"), w)
    assert got.pop("empty").shape == (0, 3)
    assert got.pop("number").item() == 2.5
    assert {k: x.dtype for k, x in got.items()} == {k: x.dtype for k, x in values.items()}
    assert all(torch.equal(got[k].view(torch.uint8), x.view(torch.uint8)) for k, x in values.items())
    with library.safe_open(file, "pt") as f:
        assert f.metadata() == {"format": "pt"}
    assert os.listdir(file.parent) == ["model.safetensors"]


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    w = torch.randn(8, 12)
    values = {str(d): torch.arange(6).view(2, 3).to(d) for d in DTYPES.values()}
    library.save_file({"w": w, "empty": torch.zeros(0, 3), **values}, tmp_path / "a.safetensors", {"format": "pt"})
    library.save_file({"number": torch.tensor(2.5)}, tmp_path / "b.safetensors")
    got = vf.load_safetensors(tmp_path / "*.safetensors")
    assert torch.equal(got.pop("w"), w)
    assert got.pop("empty").shape == (0, 3)
    assert got.pop("number").item() == 2.5
    assert {k: x.dtype for k, x in got.items()} == {k: x.dtype for k, x in values.items()}
    assert all(torch.equal(got[k].view(torch.uint8), x.view(torch.uint8)) for k, x in values.items())


@settings(max_examples=40)
@given(st.sampled_from(["a/dp b/tp", "a b/(tp dp)", "(q a/dp) b", "(a b)~[1 3]/dp", "a~/dp b~/tp", "a b {sum: dp}"]))
def test_any_layout(tmp_path_factory: Any, spec: str) -> None:
    x = torch.randn(8, 12)
    file = tmp_path_factory.getbasetemp() / "x.safetensors"
    sizes = {"q": 2} if "q" in spec else {}
    placed = vf.device_put(x, spec, MESH, **sizes)
    vf.save_safetensors(file, {"x": placed})
    assert torch.equal(vf.load_safetensors(file)["x"], x)
    got = vf.load_safetensors(file, {"x": vf.ShapeDtype((8, 12))}, {"x": spec}, mesh=MESH, **sizes)["x"]
    assert got.type == placed.type
    assert all(torch.equal(a, b) for a, b in zip(got.shards, placed.shards, strict=True))


@pytest.mark.parametrize("spec", ["a/tp b", "a b/tp", "a (h/tp k)", "(a b)~[3 0 5 0]/tp", "a b"])
def test_only_the_slices_of_a_rank_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    """To the byte, but for the header, where gaps are no less than a sector."""
    x = torch.randn(64, 2048)
    file = tmp_path / "x.safetensors"
    vf.save_safetensors(file, {"x": x, "other": torch.zeros(1000, 1000)})
    mesh, sizes = vf.make_mesh(tp=4), {"h": 4} if "h" in spec else {}
    like = vf.device_put(x, spec, mesh, **sizes)
    read: list[int] = []
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: read.append(plain(fd, b, at)) or read[-1])
    for rank, shard in enumerate(like.shards):
        del read[:]
        alone = vf.Mesh(mesh.shape, processes=4, process=rank)
        (got,) = vf.load_safetensors(file, {"x": vf.Array(ArrayType(like.layout, x.dtype, alone), [])})["x"].shards
        assert torch.equal(got, shard)
        assert sum(read) == shard.nbytes


def test_names_and_other_leaves(tmp_path: Path) -> None:
    vf.save_safetensors(tmp_path / "a.safetensors", {"model.wte.weight": torch.ones(2), "b": torch.zeros(2)})
    like = {"wte": torch.empty(2), "b": torch.empty(2), "step": 3}
    for rename in ({"wte": "model.wte.weight"}, lambda p: f"model.{p}.weight" if p == "wte" else p):
        got = vf.load_safetensors([tmp_path / "a.safetensors"], like, rename=rename)
        assert (got["wte"].tolist(), got["b"].tolist(), got["step"]) == ([1, 1], [0, 0], 3)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_write_and_read_together(pool: Pool, tmp_path: Path, processes: int) -> None:
    file = tmp_path / "x.safetensors"
    got = pool.run(tasks.safetensors, str(file), processes=processes)
    assert all(
        torch.equal(x, y) for x, y in zip(vf.load_safetensors(file).values(), tasks.VALUES.values(), strict=True)
    )
    for name, x in tasks.tree(tasks.mesh_of("dp=2,tp=2"), "dp=2,tp=2").items():
        if name in tasks.VALUES:
            ranks = [shard for held in got for shard in held[name]]
            assert all(torch.equal(a, b) for a, b in zip(ranks, x.shards, strict=True))


# ---- modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.wte(x)))


def test_back_to_a_module(tmp_path: Path) -> None:
    module = Tied()
    _, params, buffers = vf.functionalize(module)
    params = vf.device_put({k: torch.full_like(p, 3) for k, p in params.items()}, vf.rules({"*": "a/dp ..."}), MESH)
    found = vf.state_dict(module, params)
    assert list(found) == list(module.state_dict())
    assert module.load_state_dict(found)
    assert (module.head.weight == 3).all()
    assert module.head.weight is module.wte.weight
    counted = {**buffers, "norm.num_batches_tracked": torch.tensor(7)}
    module.load_state_dict(vf.state_dict(module, params, counted))
    assert module.norm.num_batches_tracked == 7


def test_values_of_another_module() -> None:
    _, params, _ = vf.functionalize(Tied())
    params["wte.wight"] = params.pop("wte.weight")
    assert said(lambda: vf.state_dict(Tied(), params)) == (
        "vf.state_dict: these are not the values of Tied:\n"
        "  wte.weight is missing (near: wte.wight)\n"
        "  wte.wight is unknown (near: wte.weight)"
    )


# ---- messages


def test_missing_tensors(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    vf.save_safetensors(file, {"wte.weight": torch.ones(2)})
    assert said(lambda: vf.load_safetensors(file, {"wte.wight": torch.empty(2)})) == (
        f"vf.load_safetensors: a tensor of like= is not in {file}:\n  wte.wight (near: wte.weight)\n"
        "rename= takes a path of like= to the name in the files."
    )
    many = {f"b{i}": torch.empty(2) for i in range(7)}
    assert said(lambda: vf.load_safetensors(file, many, rename=lambda p: f"model.{p}")) == (
        f"vf.load_safetensors: 7 tensors of like= are not in {file}; the first 5:"
        + "".join(f"\n  b{i}, looked for as model.b{i}" for i in range(5))
        + "\nrename= takes a path of like= to the name in the files."
    )


def test_other_shape_or_type(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    vf.save_safetensors(file, {"w": torch.ones(2, 3)})
    assert said(lambda: vf.load_safetensors(file, {"x": torch.empty(3).bfloat16()}, rename={"x": "w"})) == (
        f"vf.load_safetensors: x is bf16[3] in like=, but w in {file} is f32[2, 3]. "
        "Give like= the dtype and shape of the file, and convert afterwards."
    )


def test_files_that_are_none(tmp_path: Path) -> None:
    assert said(lambda: vf.load_safetensors(tmp_path / "*.safetensors")) == (
        f"vf.load_safetensors: no file matches {tmp_path}/*.safetensors."
    )
    file = tmp_path / "a.safetensors"
    for data in (b"", b"12345678", b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]" + b"0" * 9):
        file.write_bytes(data)
        assert said(lambda: vf.load_safetensors(file)) == f"{file} is no safetensors file: it has no header."
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    assert said(lambda: vf.load_safetensors(file)) == f"{file} is no safetensors file: its header has 'F4'."


def test_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    vf.save_safetensors(file, {"w": torch.ones(200)})
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert said(lambda: vf.load_safetensors(file)) == (
        f"{file} is truncated: it has {size - 1} bytes of {size}. It holds parts of w. "
        "Load an earlier checkpoint, or another copy of this one."
    )


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        vf.save_safetensors(tmp_path / f"{name}.safetensors", {"w": torch.ones(2)})
    assert said(lambda: vf.load_safetensors(tmp_path / "*")) == (
        f"vf.load_safetensors: w is in {tmp_path}/a.safetensors and in {tmp_path}/b.safetensors. "
        "Name the files of one model only."
    )


def test_what_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    assert said(lambda: vf.save_safetensors(file, {"w": torch.ones(2), "n": 3})) == (
        "vf.save_safetensors: n is of type int, which the format does not have. Convert it, or leave it out."
    )
    assert said(lambda: vf.save_safetensors(file, {"w": torch.ones(2).to(torch.complex128)})) == (
        "vf.save_safetensors: w is of dtype torch.complex128, which the format does not have. "
        "Convert it, or leave it out."
    )
    (tmp_path / "x").write_text("")
    assert said(lambda: vf.save_safetensors(tmp_path / "x" / "y", {"w": torch.ones(2)})) == (
        f"vf.save_safetensors: {tmp_path}/x/y cannot be written: File exists. A file that was there before is intact."
    )
    assert sorted(os.listdir(tmp_path)) == ["x"]
