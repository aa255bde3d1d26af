"""The exact text of what is said about checkpoints that cannot be written, read, or used."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_tasks as tasks
import pytest
import torch
from worker_pool import Failure, Pool

import vescale_fn as vf

MESH = vf.make_mesh(dp=2, tp=2)
TREE = {"params": {"w_q": torch.ones(64, 64), "w_o": torch.ones(4)}, "step": 3}
PARTIAL = " partial=True leaves out what like= does not have."
EARLIER = "Load an earlier checkpoint, or another copy of this one."


def said(fn: Callable[[], Any]) -> str:
    with pytest.raises(vf.CheckpointError) as e:
        fn()
    return str(e.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of TREE."""
    vf.save(tmp_path / "step3", TREE)
    return tmp_path / "step3"


@pytest.fixture
def nobody() -> Iterator[None]:
    """Not the superuser, who may do everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def data_of(folder: Path) -> Path:
    (file,) = folder.glob("data-*")
    return file


# ---- files


def test_nothing_there(tmp_path: Path) -> None:
    assert said(lambda: vf.load(tmp_path / "step9")) == (
        f"There is no checkpoint in {tmp_path}/step9: it does not exist. Give the path that was given to vf.save."
    )
    assert said(lambda: vf.load(tmp_path)) == (
        f"There is no checkpoint in {tmp_path}: it has no checkpoint.json. Give the path that was given to vf.save."
    )


def test_newer_format(folder: Path) -> None:
    file = folder / "checkpoint.json"
    head = file.read_text().splitlines()[0]
    file.write_text(json.dumps({**json.loads(head), "version": 2}) + "\nwho knows\n")
    assert said(lambda: vf.load(folder)) == (
        f"The checkpoint in {folder} has format version 2, and this vescale_fn reads versions up to 1. "
        "Load it with the newer vescale_fn that wrote it, or upgrade."
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b.replace(b'{"value": 3}', b'{"value": 4}'),
        lambda b: b[:-100],
        lambda b: b[:40],
        lambda b: b"",
        lambda b: b"\x00" * len(b),
        lambda b: b.replace(b'"version": 1', b'"version": "one"'),
        lambda b: b.replace(b"vescale_fn", b"something"),
    ],
)
def test_corrupt_manifest(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    file = folder / "checkpoint.json"
    data = file.read_bytes()
    assert damage(data) != data
    file.write_bytes(damage(data))
    assert said(lambda: vf.load(folder)) == (
        f"{file} is corrupt: its checksum does not fit its contents. Load an earlier checkpoint."
    )


def test_missing_file(folder: Path) -> None:
    file = data_of(folder)
    file.unlink()
    assert said(lambda: vf.load(folder)) == (
        f"{file} is missing. It holds parts of params.w_q, params.w_o. "
        "Copy all files of a checkpoint together, or load an earlier one."
    )


def test_truncated_file(folder: Path) -> None:
    file = data_of(folder)
    os.truncate(file, 16000)
    assert said(lambda: vf.load(folder)) == (
        f"{file} is truncated: it has 16,000 bytes of 16,400. It holds parts of params.w_q, params.w_o. {EARLIER}"
    )
    os.truncate(file, 16401)
    assert said(lambda: vf.load(folder)) == (
        f"{file} is not the file that was saved: it has 16,401 bytes of 16,400. "
        f"It holds parts of params.w_q, params.w_o. {EARLIER}"
    )


def test_corrupt_data(folder: Path) -> None:
    file = data_of(folder)
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    assert said(lambda: vf.load(folder)) == (
        f"{file} is corrupt: bytes 4,096 to 8,192, which hold params.w_q[32:64, 0:32], do not fit their checksum. "
        f"{EARLIER}"
    )
    part = {"params": {"w_o": TREE["params"]["w_o"]}}  # type: ignore[index]
    assert vf.load(folder, part, partial=True)["params"]["w_o"].tolist() == [1] * 4


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    w = vf.device_put(torch.arange(16.0).reshape(4, 4), "a/dp b/tp", MESH)
    vf.save(tmp_path, {"w": w, "step": 3})
    for file in tmp_path.iterdir():
        data = file.read_bytes()
        for i in range(0, len(data), 7 if file.suffix == ".json" else 1):
            damaged = bytearray(data)
            damaged[i] ^= 1 << i % 8
            file.write_bytes(damaged)
            try:
                got = vf.load(tmp_path)
            except vf.CheckpointError:
                continue
            finally:
                file.write_bytes(data)
            raise AssertionError(f"byte {i} of {file.name}: {got}")


def test_no_permission_to_write(tmp_path: Path, nobody: None) -> None:
    assert said(lambda: vf.save("/usr/checkpoint", 1)) == (
        "vf.save: there is no permission to write to /usr/checkpoint. Nothing there has changed."
    )


def test_no_permission_to_read(folder: Path, request: pytest.FixtureRequest) -> None:
    file = data_of(folder)
    for path in (folder, *folder.parents[:4]):
        path.chmod(0o755)
    file.chmod(0)
    request.getfixturevalue("nobody")
    assert said(lambda: vf.load(folder)) == f"vf.load: there is no permission to read {file}."


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    assert said(lambda: vf.save(tmp_path / "x", 1)) == (
        f"vf.save: saving to {tmp_path}/x failed: [Errno 17] File exists: '{tmp_path}/x'. "
        "The checkpoint that was there before, if any, is intact."
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("room", [0, 5000, 16_400])
def test_disk_full(folder: Path, monkeypatch: pytest.MonkeyPatch, room: int, asynchronous: bool) -> None:
    """While data is written, and when it is forced to the disk."""
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    plain_write, plain_sync, left = os.write, os.fsync, [room]

    def write(fd: int, data: Any) -> int:
        if not left[0] and len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = plain_write(fd, bytes(data)[: left[0]])
        left[0] -= count
        return count

    def fsync(fd: int) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain_sync(fd)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", fsync)

    def save() -> None:
        saving = vf.save(folder, {**TREE, "step": 4}, wait=not asynchronous)
        if saving is not None:
            saving.result()

    assert said(save) == (
        f"vf.save: the disk of {folder} is full. What this save had written is removed, and the checkpoint "
        "that was there before, if any, is intact. Make room, or save elsewhere."
    )
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    monkeypatch.undo()
    assert vf.load(folder)["step"] == 3


FULL = """
import sys, torch, vescale_fn as vf
vf.save(sys.argv[1], {"w": torch.ones(100_000), "step": 1})
try:
    vf.save(sys.argv[1], {"w": torch.zeros(400_000), "step": 2})
except vf.CheckpointError as e:
    print(e)
print(vf.load(sys.argv[1])["step"], vf.load(sys.argv[1])["w"].sum().item())
"""


def test_a_small_disk(tmp_path: Path) -> None:
    """A real one, where this user may mount one."""
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot mount a small disk")
    done = subprocess.run([*command, sys.executable, "-c", FULL, str(tmp_path / "c")], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        f"vf.save: the disk of {tmp_path}/c is full. What this save had written is removed, and the checkpoint that "
        "was there before, if any, is intact. Make room, or save elsewhere.",
        "1 100000.0",
    ], done.stderr


def test_a_failure_that_nobody_asks_for(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fsync)
    saving = vf.save(folder, 1, wait=False)
    saving.wait()
    assert repr(saving) == f"Saving({str(folder)!r}, failed)"
    del saving
    monkeypatch.undo()
    vf.save(folder, 2)  # waits for it, and lets it go
    assert capsys.readouterr().err == (
        f"A save to {folder} failed, and nobody asked for its result: vf.save: saving to {folder} failed: "
        "[Errno 5] broken. The checkpoint that was there before, if any, is intact.\n"
    )


def test_a_failure_on_one_process_is_told_to_all(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.outcomes(tasks.save_on_a_full_disk, str(tmp_path))
    assert [o.message for o in outcomes if isinstance(o, Failure)] == [
        f"vf.save: the disk of {tmp_path} is full (process 1). What this save had written is removed, and the "
        "checkpoint that was there before, if any, is intact. Make room, or save elsewhere."
    ] * 2
    assert list(tmp_path.iterdir()) == []
    outcomes = pool.outcomes(tasks.load, str(tmp_path), "tp=4")
    assert [o.message for o in outcomes if isinstance(o, Failure)] == [
        f"There is no checkpoint in {tmp_path}: it has no checkpoint.json. Give the path that was given to vf.save."
    ] * 2


def test_damage_that_one_process_reads_is_told_to_all(pool: Pool, tmp_path: Path) -> None:
    tasks.save(0, 1, str(tmp_path), "tp=4")
    file = data_of(tmp_path)
    file.write_bytes(b"\xff" + file.read_bytes()[1:])
    outcomes = pool.outcomes(tasks.load, str(tmp_path), "tp=4")
    messages = [o.message for o in outcomes if isinstance(o, Failure)]
    assert len(messages) == 2
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{file} is corrupt: bytes 0 to ")


def test_dtensors(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.outcomes(tasks.save_a_dtensor, str(tmp_path))
    assert [o.message for o in outcomes if isinstance(o, Failure)] == [
        "vf.save: w is a DTensor. Make it an Array, which shares its memory: vf.Array.from_dtensor."
    ] * 2


# ---- trees


def other_tree(folder: Path, which: str, lines: list[str], hint: str = PARTIAL) -> str:
    return (
        f"vf.load: {folder} does not hold the tree of like=; {which}:"
        + "".join(f"\n  {line}" for line in lines)
        + f"\nGive like= the form of what was saved.{hint}"
    )


def test_another_tree(folder: Path) -> None:
    like = {"params": {"wq": torch.empty(64, 64), "w_o": torch.empty(4)}, "step": 0}
    assert said(lambda: vf.load(folder, like)) == other_tree(
        folder,
        "the differences",
        [
            "params.wq is in like= only (near: params.w_q)",
            "params.w_q is in the checkpoint only (near: params.wq)",
        ],
    )
    assert said(lambda: vf.load(folder, like, partial=True)) == other_tree(
        folder, "the differences", ["params.wq is in like= only (near: params.w_q)"], ""
    )
    many = {f"layer{i}": torch.empty(1) for i in range(9)}
    assert said(lambda: vf.load(folder, many)) == other_tree(
        folder, "the first 5 of 12 differences", [f"layer{i} is in like= only" for i in range(5)]
    )
    assert said(lambda: vf.load(folder, torch.empty(3))) == other_tree(
        folder,
        "the differences",
        [
            "the tree is in like= only",
            *(f"{p} is in the checkpoint only" for p in ("params.w_q", "params.w_o", "step")),
        ],
    )


def test_other_shapes_and_types(folder: Path) -> None:
    like = {
        "params": {"w_q": torch.empty(64, 32), "w_o": vf.device_put(torch.empty(4).bfloat16(), "d/dp", MESH)},
        "step": 3.0,
    }
    assert said(lambda: vf.load(folder, like)) == other_tree(
        folder,
        "the differences",
        [
            "params.w_q is f32[64, 32] in like=, f32[64, 64] in the checkpoint",
            "params.w_o is bf16[4] in like=, f32[4] in the checkpoint",
            "step is of type float in like=, of type int in the checkpoint",
        ],
    )
    kinds = {"params": {"w_q": None, "w_o": {1, 2}}, "step": torch.tensor(0)}
    assert said(lambda: vf.load(folder, kinds)) == other_tree(
        folder,
        "the differences",
        [
            "params.w_q is None in like=, f32[64, 64] in the checkpoint",
            "params.w_o is of type set in like=, f32[4] in the checkpoint",
            "step is i64[] in like=, of type int in the checkpoint",
        ],
    )


def test_where_it_goes(folder: Path) -> None:
    like = {"params": {"w_q": vf.ShapeDtype((64, 64)), "w_o": vf.ShapeDtype((4,))}, "step": 0}
    assert said(lambda: vf.load(folder, like, "...")) == (
        "vf.load: shardings= are given, and nothing says on which mesh. Pass mesh=vf.make_mesh(...), a "
        "vf.NamedSharding in the place of a spec, or Arrays on a mesh in like=."
    )
    abstract = vf.device_put(like, {"params": "...", "step": ""}, vf.abstract_mesh(dp=2))
    assert said(lambda: vf.load(folder, {**abstract, "step": 0})) == (
        "vf.load: params.w_q is an Array on the abstract mesh dp=2, which holds nothing. "
        "Pass mesh=vf.make_mesh(...) to say where the values go."
    )
    with pytest.raises(ValueError) as e:
        vf.load(folder, like, {"params": {"w_q": "a/pp b", "w_o": None}, "step": None}, mesh=MESH)
    assert str(e.value) == (
        "vf.load: params.w_q: There is no mesh axis 'pp': this mesh has dp=2, tp=2.\n  a/pp b\n    ^"
    )


def test_leaves_that_cannot_be_saved(tmp_path: Path) -> None:
    end = (
        "Leaves must be Arrays, dense tensors, NumPy arrays, numbers, strings, bytes or None: convert it, or leave it "
        "out of the tree."
    )
    for value, kind in [
        ({1}, "set"),
        (1j, "complex"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo, torch.float32 tensor on cpu"),
        (torch.empty(2, device="meta"), "torch.strided, torch.float32 tensor on meta"),
    ]:
        assert said(lambda v=value: vf.save(tmp_path, {"a": [v]})) == f"vf.save: a.0 is of type {kind}. {end}"
    abstract = vf.device_put(vf.ShapeDtype((4,)), "d", vf.abstract_mesh(dp=2))
    assert said(lambda: vf.save(tmp_path, {"a": abstract})) == (
        "vf.save: a: This Array (f32[4] 'a' on dp=2) lives on an abstract mesh: it has a shape and a sharding, but no "
        "values. Use vf.make_mesh and vf.device_put for Arrays that hold something."
    )
    assert said(lambda: vf.save(tmp_path, {"a": {"b": 1}, "a.b": 2})) == (
        "vf.save: two leaves of the tree have the path 'a.b', by which leaves are saved. "
        "Rename a key: dots in keys look like nesting."
    )
    assert list(tmp_path.iterdir()) == []
