"""Regions: the bodies of `shard_map`, in which users say what one rank does.

states (what a value is along an axis) -> moves (collectives and casts, and their transposes) -> region (what is under
way) -> casts (inserted above autograd) -> collectives, shard_map (what users call) -> check (the authority over a
traced graph) -> lower (what solver and partition need to know).
"""
