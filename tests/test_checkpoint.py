"""Checkpoints: bit for bit on any mesh, read in parts, all at once or not at all."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_tasks as tasks
import numpy as np
import pytest
import simulate
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reshard import chains
from worker_pool import Pool

import vescale_fn as vf
from vescale_fn.array import ArrayType
from vescale_fn.checkpoint import buffer, files, manifest
from vescale_fn.checkpoint.boxes import boxes
from vescale_fn.checkpoint.files import Writer
from vescale_fn.checkpoint.parts import without_pending
from vescale_fn.checkpoint.tiles import tiling
from vescale_fn.sharding.layout import Layout

MESH = vf.make_mesh(dp=2, tp=2)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tensors of any type, not-a-numbers included."""
    raw = [x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read from a file."""
    found: list[int] = []
    plain = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        found.append(plain(fd, buffers, offset))
        return found[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return found


# ---- boxes and tiles


@settings(max_examples=300)
@given(chains(1))
def test_boxes_are_what_ranks_hold(layouts: tuple[Layout]) -> None:
    layout = without_pending(layouts[0])
    x = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    for coords, part in zip(layout.mesh.all_coords(), simulate.distribute(x, layout)):
        local = torch.tensor(part)
        seen = torch.zeros_like(local)
        for box in boxes(layout, coords):
            index = buffer.region(box.start, box.shape)
            assert np.array_equal(box.of(local).numpy(), x[index])
            box.of(seen).add_(1)
        assert bool((seen == 1).all())


@given(
    st.lists(st.integers(1, 300), max_size=3).map(tuple),
    st.sampled_from([1, 2, 4, 8]),
    st.randoms(use_true_random=False),
    st.integers(1, 5),
)
def test_runs_of_tiles_cover_a_part_once(shape: tuple[int, ...], itemsize: int, rng: random.Random, most: int) -> None:
    t = tiling(shape, itemsize)
    assert all(n % k == 0 for n, k in zip(shape, t.tile))
    start = tuple(rng.randrange(n) for n in shape)
    part = tuple(rng.randint(1, n - a) for a, n in zip(start, shape))
    seen = np.zeros(shape, int)
    used: list[int] = []
    for run in t.runs(start, part, most):
        seen[buffer.region(run.start, run.shape)] += 1
        assert math.prod(run.shape) == run.count * t.tile_numel
        used += range(run.first, run.first + run.count)
    assert (seen[buffer.region(start, part)] == 1).all()
    assert seen.max() == 1
    assert len(set(used)) == len(used)
    assert all(0 <= i < t.count for i in used)
    low, high = np.array(start), np.array(start) + part  # no tile that the part does not touch
    touched = [-(-b // k) - a // k for a, b, k in zip(low, high, t.tile)]
    assert len(used) == math.prod(int(n) for n in touched)


def test_tiles_of_large_boxes_end_where_meshes_cut() -> None:
    for shape in [(4096, 4096), (12288, 4096), (50304, 768), (32, 4096, 11008)]:
        t = tiling(shape, 2)
        assert 4 * 1024 <= 2 * t.tile_numel <= 128 * 1024
        assert all(n // 8 % k == 0 for n, k in zip(shape, t.tile))


# ---- there and back


@settings(max_examples=150)
@given(chains(2), st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex128]))
def test_any_layout_to_any_other(tmp_path_factory: Any, pair: tuple[Layout, Layout], dtype: torch.dtype) -> None:
    src, dst = pair
    if dtype != torch.float32:  # not all types have all reductions
        src = without_pending(src)
    x = np.random.default_rng(0).integers(-50, 50, src.shape).astype(np.float32)
    mesh = vf.Mesh(src.mesh)
    shards = [torch.from_numpy(np.array(p)).to(dtype) for p in simulate.distribute(x, src)]
    folder = tmp_path_factory.getbasetemp() / "pairs"
    vf.save(folder, [vf.Array(ArrayType(src, dtype, mesh), shards)])
    like = vf.Array(ArrayType(dst, dtype, mesh), [])
    (got,) = vf.load(folder, [like])
    whole = torch.from_numpy(x).to(dtype)
    assert got.type == like.type
    if dtype == torch.float32:
        assert np.array_equal(simulate.assemble([s.numpy() for s in got.shards], dst), x)
    elif not dst.partial:
        assert same_bits(got.full(), whole)
    assert same_bits(vf.load(folder)["0"], whole)


def test_every_kind_of_leaf(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan"), -0.0, float("inf")])
    tree = {
        "arrays": [vf.device_put(torch.randn(4, 6), "a/dp b/tp", MESH), vf.device_put(torch.tensor(7), "", MESH)],
        "tensor": nan,
        "column": torch.arange(12).reshape(3, 4)[:, 1],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.zeros(0, 3),
        "numpy": np.arange(3, dtype=np.int16),
        "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "step": 3,
        "large": 2**100,
        "lr": 0.1,
        "small": 5e-324,
        "infinite": -math.inf,
        "flag": True,
        "name": "naïve \u2028 \ud800",
        "raw": b"\x00\xff",
        "nothing": None,
    }
    vf.save(tmp_path, tree)
    got = vf.load(tmp_path, tree)
    assert list(got) == list(tree)
    for a, b in zip(got["arrays"], tree["arrays"]):
        assert a.type == b.type
        assert same_bits(a.full(), b.full())
    for name in ("tensor", "column", "parameter", "empty", "float8"):
        assert same_bits(got[name], tree[name])
    assert same_bits(got["numpy"], torch.arange(3, dtype=torch.int16))
    for name in list(tree)[7:]:
        assert (type(got[name]), got[name]) == (type(tree[name]), tree[name])


def test_shardings_mesh_and_like_say_where_values_go(tmp_path: Path) -> None:
    w = torch.arange(24.0).reshape(4, 6)
    vf.save(tmp_path, {"w": w, "step": 1})
    other = vf.make_mesh(dp=1, tp=2)
    described = {"w": vf.ShapeDtype((4, 6)), "step": 0}
    by_rules = vf.load(tmp_path, described, vf.rules({"w": "a (h/tp k)"}), mesh=other)["w"]
    assert str(by_rules.sharding) == "NamedSharding(dp=1,tp=2: 'a (h/tp k)')"
    named = vf.load(tmp_path, described, {"w": vf.NamedSharding(other, "a b/tp"), "step": None})["w"]
    assert named.mesh == other
    kept = vf.load(tmp_path, {"w": vf.device_put(w, "a/dp b/tp", MESH), "step": 0}, mesh=other)["w"]
    assert str(kept.sharding) == "NamedSharding(dp=1,tp=2: 'a/dp b/tp')"
    abstract = vf.device_put(vf.ShapeDtype((4, 6)), "a b/tp", vf.abstract_mesh(dp=1, tp=2))
    assert vf.load(tmp_path, {"w": abstract, "step": 0}, mesh=other)["w"].mesh == other
    plain = vf.load(tmp_path, {"w": torch.empty(4, 6, device="meta"), "step": 0})["w"]
    for x in (by_rules, named, kept):
        assert torch.equal(x.full(), w)
    assert torch.equal(plain, w)


def test_a_part_of_a_tree(tmp_path: Path, count: list[int]) -> None:
    vf.save(tmp_path, {"params": {"w": torch.ones(4)}, "opt": {"m": torch.zeros(1000)}, "step": 9})
    assert vf.load(tmp_path, {"params": {"w": torch.empty(4)}}, partial=True)["params"]["w"].tolist() == [1] * 4
    assert sum(count) == 16


def test_the_tree_that_is_loaded_is_not_written_to(tmp_path: Path) -> None:
    w = vf.device_put(torch.ones(4), "d/dp", MESH)
    vf.save(tmp_path, w)
    like = vf.device_put(torch.zeros(4), "d/dp", MESH)
    assert torch.equal(vf.load(tmp_path, like).full(), torch.ones(4))
    assert torch.equal(like.full(), torch.zeros(4))


def test_replicas_are_stored_once(tmp_path: Path) -> None:
    w = vf.device_put(torch.randn(64, 64), "a b/tp", MESH)
    vf.save(tmp_path, w)
    (data,) = tmp_path.glob("data-*")
    assert data.stat().st_size == 64 * 64 * 4


def test_nothing_is_pickled(tmp_path: Path) -> None:
    vf.save(tmp_path, {"w": torch.arange(3, dtype=torch.int32), "step": 3})
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".bin", ".json"]
    (data,) = tmp_path.glob("data-*")
    assert data.read_bytes() == torch.arange(3, dtype=torch.int32).numpy().tobytes()
    head, body = map(json.loads, (tmp_path / "checkpoint.json").read_text().splitlines())
    assert (head["format"], head["version"], list(body)) == ("vescale_fn checkpoint", 1, ["save", "leaves", "files"])


# ---- what is read


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ("dp=2,tp=2 d/dp f/tp", "tp=4 d f/tp"),
        ("dp=2,tp=2 d/dp f/tp", "tp=4 d/tp f"),
        ("dp=2,tp=2 d/dp f/tp", "dp=2,tp=2 d/dp f/tp"),
        ("x=1 d f", "tp=8 d f/tp"),
        ("x=1 d f", "tp=3 d f/tp"),
        ("tp=4 d (q f/tp)", "tp=2 d (q f/tp)"),
        ("tp=4 d (q f/tp)", "dp=6 d/dp f"),
        ("x=2,y=4 (d f)~[3 5]/x", "tp=4 d f/tp"),
    ],
)
def test_a_shard_reads_little_more_than_itself(tmp_path: Path, count: list[int], saved: str, wanted: str) -> None:
    x = torch.randn(768, 1536)

    def placed(text: str) -> Any:
        axes, _, spec = text.partition(" ")
        mesh = vf.make_mesh(**{a: int(n) for a, n in (p.split("=") for p in axes.split(","))})
        return vf.device_put(x, spec, mesh, **({"q": 3} if "q" in spec else {}))

    vf.save(tmp_path, {"x": placed(saved)})
    like = placed(wanted)
    for rank, shard in enumerate(like.shards):
        del count[:]
        alone = vf.Mesh(like.mesh.shape, processes=like.mesh.size, process=rank)
        (got,) = vf.load(tmp_path, {"x": vf.Array(ArrayType(like.layout, x.dtype, alone), [])})["x"].shards
        assert same_bits(got, shard)
        assert sum(count) <= 1.05 * shard.nbytes


# ---- asynchronous


def test_values_are_those_of_the_call(tmp_path: Path) -> None:
    step = vf.pjit(lambda x: x + 1, donate_argnums=0)
    x = vf.device_put(torch.zeros(1000, 100), "a/dp b/tp", MESH)
    plain = torch.zeros(1000)
    savings = []
    for i in range(4):
        savings.append(vf.save(tmp_path / str(i), {"x": x, "plain": plain, "i": i}, wait=False))
        x = step(x)
        plain += 1
    for i, saving in enumerate(savings):
        saving.result()
        got = vf.load(tmp_path / str(i))
        assert (got["x"] == i).all()
        assert (got["plain"] == i).all()
        assert got["i"] == i
    assert (x.full() == 4).all()


def test_saves_to_one_folder_take_turns(tmp_path: Path) -> None:
    savings = [vf.save(tmp_path, torch.full((100_000,), i), wait=False) for i in range(5)]
    assert (vf.load(tmp_path)[""] == 4).all()  # a load waits for the saves before it
    assert all(s.done() for s in savings)
    assert repr(savings[0]) == f"Saving({str(tmp_path)!r}, done)"
    assert len(list(tmp_path.iterdir())) == 2


# ---- processes


@pytest.mark.parametrize(
    ("saved", "writers", "wanted", "readers"),
    [
        ("dp=2,tp=2", 4, "tp=4", 2),
        ("tp=4", 2, "dp=1", 1),
        ("dp=2,tp=2", 1, "dp=4", 4),
        ("dp=4", 2, "dp=2,tp=2", 1),
    ],
)
def test_any_number_of_processes(
    pool: Pool, tmp_path: Path, saved: str, writers: int, wanted: str, readers: int
) -> None:
    if writers == 1:
        tasks.save(0, 1, str(tmp_path), saved)
    else:
        pool.run(tasks.save, str(tmp_path), saved, writers == 2, processes=writers)
    assert len(list(tmp_path.glob("data-*"))) == writers
    if readers == 1:
        got = [tasks.load(0, 1, str(tmp_path), wanted)]
    else:
        got = pool.run(tasks.load, str(tmp_path), wanted, processes=readers)
    expected = tasks.tree(tasks.mesh_of(wanted), wanted)
    for name in tasks.VALUES:
        ranks = [shard for held, _, _ in got for shard in held[name]]
        assert all(same_bits(a, b) for a, b in zip(ranks, expected[name].shards, strict=True))
    assert all(step == 3 and plain.tolist() == [0, 1, 2] for _, step, plain in got)


def test_training_goes_on_anywhere(pool: Pool, tmp_path: Path, deep: bool) -> None:
    """With the state, its random key and the position in the data in the checkpoint: bit for bit on the same mesh, on
    any number of processes (of two: more add up in another order), and to rounding on another mesh."""
    whole, rest = tasks.train(0, 1, "dp=2,tp=2", str(tmp_path), 0, 2)
    assert rest == whole[2:]
    assert pool.run(tasks.train, "dp=2,tp=2", str(tmp_path), 2, timeout=120) == [[rest]] * 2
    for name in ("tp=4", "dp=4") if deep else ("tp=4",):
        (other,) = tasks.train(0, 1, name, str(tmp_path), 2)
        assert [float.fromhex(x) for x in other] == pytest.approx([float.fromhex(x) for x in rest], rel=1e-6)


# ---- all or nothing


def forked(work: Callable[[], None], seconds: float) -> None:
    """Run something in a copy of this process and kill it after some time."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_killed_save_leaves_a_checkpoint(tmp_path: Path, deep: bool) -> None:
    """The one before or the new one, and the next save clears up."""
    values = [torch.full((300, 1000), i) for i in range(3)]
    vf.save(tmp_path, {"i": 0, "values": [values[0]] * 4})

    def save_on() -> None:
        for i in range(1, 1000):
            vf.save(tmp_path, {"i": i, "values": [values[i % 3]] * 4})

    rng, found = random.Random(0), set()
    for _ in range(20 if deep else 6):
        forked(save_on, 0.05 + 0.2 * rng.random())
        got = vf.load(tmp_path)
        assert all((got[f"values.{k}"] == got["i"] % 3).all() for k in range(4))
        found.add(got["i"])
    assert len(found) > 1
    vf.save(tmp_path, {"i": -1})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.json"]


def test_a_killed_first_save_is_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "new"

    def save_forever() -> None:
        Writer.finish = lambda *_, **__: time.sleep(60)  # type: ignore[method-assign]
        vf.save(folder, torch.ones(3))

    forked(save_forever, 1)
    assert [p.suffix for p in folder.iterdir()] == [".bin"]
    with pytest.raises(vf.CheckpointError) as e:
        vf.load(folder)
    assert str(e.value) == (
        f"There is no checkpoint in {folder}: a save began there and did not end, and nothing was there before. "
        "Load an earlier one, or start afresh."
    )


def test_files_of_others_stay(tmp_path: Path) -> None:
    names = ["data-1.bin", "notes.txt", "checkpoint.json.bak", "data-0123abcd-00000.bin", "checkpoint.json.0123abcd"]
    for name in names:
        (tmp_path / name).write_text("mine")
    vf.save(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint.json",
        "checkpoint.json.bak",
        "data-1.bin",
        "notes.txt",
    ]


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody saves between the reading of the manifest and that of the files, and again when these are open."""
    vf.save(tmp_path, {"w": torch.zeros(1000).long(), "i": 0})
    read_manifest, fill = manifest.read, files.fill
    todo = [1]

    def save_again(i: int) -> None:
        vf.save(tmp_path, {"w": torch.full((1000,), i), "i": i})

    def read(folder: Path) -> Any:
        found = read_manifest(folder)
        if todo == [1]:
            todo[0] = 2
            save_again(1)
        return found

    def fill_later(*args: Any) -> int:
        if todo == [2]:
            todo[0] = 3
            save_again(2)
        return fill(*args)

    monkeypatch.setattr(manifest, "read", read)
    monkeypatch.setattr(files, "fill", fill_later)
    got = vf.load(tmp_path, {"w": torch.empty(1000).long(), "i": 0})
    assert todo == [3]
    assert got["i"] == 1
    assert (got["w"] == 1).all()
    assert vf.load(tmp_path)["i"] == 2
