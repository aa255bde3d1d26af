"""Engines: what runs a per-rank program."""

from __future__ import annotations

from functools import lru_cache

from vescale_fn.engines.engine import Engine, Executable
from vescale_fn.sharding.mesh import Mesh

__all__ = ["Engine", "Executable", "engine_for"]


def engine_for(mesh: Mesh, deterministic: bool = False) -> Engine:
    """The engine of a mesh; its process groups are created once.

    deterministic: the same bits for any number of processes (slower reductions). Virtual ranks always are.
    """
    return _engine(mesh, deterministic)  # the cache would tell engine_for(mesh) and engine_for(mesh, False) apart


@lru_cache(maxsize=64)
def _engine(mesh: Mesh, deterministic: bool) -> Engine:
    if mesh.kind == "abstract":
        raise ValueError(
            f"Mesh {mesh} is abstract: programs can be lowered, printed and costed on it, but it has no devices to run "
            "on. Use vf.make_mesh."
        )
    if mesh.kind == "virtual":
        from vescale_fn.engines.virtual import VirtualEngine

        return VirtualEngine(mesh)
    from vescale_fn.engines.torchdist import TorchDistEngine

    return TorchDistEngine(mesh, deterministic)
