"""What the worker processes save and load."""

from __future__ import annotations

import errno
import os
from typing import Any

import torch
import torch.nn.functional as F
from gpt import MEGATRON, Sizes, data, make_step, on_mesh

import vescale_fn as vf

W = torch.arange(64.0 * 48).reshape(64, 48)
VALUES = {"w": W, "u": torch.arange(10).reshape(5, 2), "v": torch.tensor(2.5, dtype=torch.bfloat16)}
SPECS = {
    "dp=2,tp=2": {"w": "d/dp (q f/tp)", "u": "a~/tp b", "v": ""},
    "tp=4": {"w": "d (q f/tp)", "u": "(a b)~[3 0 6 1]/tp", "v": ""},
    "dp=4": {"w": "d/dp f", "u": "a~/dp b", "v": ""},
    "dp=1": {"w": "d f", "u": "a b", "v": ""},
}


def mesh_of(name: str, processes: int = 1) -> vf.Mesh:
    sizes = {axis: int(n) for axis, n in (part.split("=") for part in name.split(","))}
    return vf.make_mesh(**sizes, processes=processes if processes > 1 else None)


def sizes_of(name: str) -> dict[str, int]:
    return {"q": 3} if "q" in SPECS[name]["w"] else {}


def tree(mesh: vf.Mesh, name: str) -> dict[str, Any]:
    values = vf.device_put(VALUES, SPECS[name], mesh, **sizes_of(name))
    return {**values, "step": 3, "plain": torch.arange(3)}


def save(process: int, processes: int, folder: str, name: str, wait: bool = True) -> None:
    saving = vf.save(folder, tree(mesh_of(name, processes), name), wait=wait)
    if saving is not None:
        saving.result()


def load(process: int, processes: int, folder: str, name: str) -> Any:
    """The parts of this process, and the plain values."""
    mesh = mesh_of(name, processes)
    described = {k: vf.ShapeDtype(tuple(x.shape), x.dtype) for k, x in VALUES.items()}
    like = {**described, "step": 0, "plain": torch.empty(3, dtype=torch.long)}
    got = vf.load(folder, like, {**SPECS[name], "step": None, "plain": None}, mesh=mesh, **sizes_of(name))
    return {k: [s.clone() for s in got[k].shards] for k in VALUES}, got["step"], got["plain"]


def save_on_a_full_disk(process: int, processes: int, folder: str) -> None:
    """The disk of process 1 is."""

    def write(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    plain = os.write
    os.write = write if process == 1 else plain  # type: ignore[assignment]
    try:
        save(process, processes, folder, "tp=4")
    finally:
        os.write = plain


def save_a_dtensor(process: int, processes: int, folder: str) -> None:
    w = vf.device_put(VALUES["w"], "d/dp f", vf.make_mesh(dp=2))
    vf.save(folder, {"w": w.to_dtensor()})


def safetensors(process: int, processes: int, file: str) -> Any:
    """The parts of this process, written and read again."""
    mesh, name = mesh_of("dp=2,tp=2", processes), "dp=2,tp=2"
    like = {k: x for k, x in tree(mesh, name).items() if k in VALUES}
    vf.save_safetensors(file, like)
    got = vf.load_safetensors(file, like)
    return {k: [s.clone() for s in x.shards] for k, x in got.items()}


def train(process: int, processes: int, name: str, folder: str, *starts: int) -> list[list[str]]:
    """Losses, exactly, of a small GPT with dropout in the last of four steps: after 0, or after 2. The run from 0
    keeps a checkpoint after step 2, from which the other goes on."""
    sizes = Sizes(layers=1, width=32)
    mesh = mesh_of({"tp=4": "dp=1,tp=4", "dp=4": "dp=4,tp=1"}.get(name, name), processes)
    begin, _, _ = on_mesh(sizes, mesh, MEGATRON)
    plain = make_step(sizes, between=lambda h: F.dropout(h, 0.1))

    @vf.pjit
    def step(state: Any, key: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        with vf.random.scope(key):
            return plain(state, x, y)

    def run(first: int) -> list[str]:
        losses, saved = [], {"state": begin, "key": vf.random.key(0), "batch": 0}
        if first:
            saved = vf.load(folder, saved)
        while saved["batch"] < 4:
            key, own = vf.random.split(saved["key"])
            x, y = vf.device_put(data(sizes, seed=saved["batch"]), "b/dp s", mesh)
            state, loss = step(saved["state"], own, x, y)
            saved = {"state": state, "key": key, "batch": saved["batch"] + 1}
            losses.append(float(loss).hex())
            if saved["batch"] == 2 and not first:
                vf.save(folder, saved, wait=False)
        return losses

    return [run(first) for first in starts]
