"""Pytrees: the one module that takes trees of values apart and puts them together.

Nodes are those of torch's own pytree (lists, tuples, dicts, named tuples, classes registered with it or with
`pytree`), `None` is a leaf, and dicts keep the order in which their keys were inserted, as in torch: leaves come in the
same order from here and from `torch.utils._pytree`. A leaf's path is dotted: `params.blocks.0.w_qkv`.
"""

from __future__ import annotations
import __future__

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_origin

import optree
import torch
import torch.utils._cxx_pytree  # sets up the namespace "torch" of optree: its nodes, and the order of dict keys
import torch.utils._pytree

from vescale_fn.errors import one_line

_OPTIONS: Mapping[str, Any] = {"none_is_leaf": True, "namespace": "torch"}
C = TypeVar("C")


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves, and the treedef that `unflatten` takes. Treedefs are hashable and compare equal when trees have one form.

    >>> flatten({"b": 1, "a": [2, None]})[0]
    [1, 2, None]
    """
    leaves, treedef = optree.tree_flatten(tree, **_OPTIONS)
    return leaves, treedef


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    """The tree with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def flatten_with_paths(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Dotted path of each leaf ("" when the tree is a leaf), leaves, treedef.

    >>> flatten_with_paths({"w": [1, 2]})[0]
    ['w.0', 'w.1']
    """
    accessors, leaves, treedef = optree.tree_flatten_with_accessor(tree, **_OPTIONS)
    return [".".join(map(_step, a)) for a in accessors], leaves, treedef


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The tree with fn applied to each leaf (and the leaves of trees of the same form)."""
    return optree.tree_map(fn, tree, *rest, **_OPTIONS)


def map_tensors(tree: Any, fn: Callable[[Any], Any], kinds: type | tuple[type, ...] = torch.Tensor) -> Any:
    """`tree` (nested tuples, lists and dicts of arguments) with fn applied to each tensor, or each of these kinds."""
    if isinstance(tree, kinds):
        return fn(tree)
    if type(tree) in (tuple, list):
        return type(tree)([map_tensors(t, fn, kinds) for t in tree])
    if type(tree) is dict:
        return {k: map_tensors(v, fn, kinds) for k, v in tree.items()}
    return tree


def is_leaf(tree: Any) -> bool:
    """Whether the tree is a single leaf."""
    return bool(optree.tree_is_leaf(tree, **_OPTIONS))


def children(tree: Any) -> list[Any]:
    """The direct subtrees of a node; none of a leaf."""
    return [] if is_leaf(tree) else [child for _, child in _items(tree)]


def _items(tree: Any) -> list[tuple[str, Any]]:
    """The direct subtrees of a node, with the step that leads to each."""
    accessors, subtrees, _ = optree.tree_flatten_with_accessor(tree, is_leaf=lambda x: x is not tree, **_OPTIONS)
    return [(_step(a[0]), x) for a, x in zip(accessors, subtrees)]


def _step(entry: Any) -> str:
    """One step of a path: a key, an index, or the name of a field."""
    if isinstance(entry, optree.DataclassEntry) and isinstance(entry.entry, int):
        return _children_fields(entry.type)[entry.entry]
    if isinstance(entry, optree.NamedTupleEntry):
        return str(entry.field)
    return str(entry.entry)


# ---- dataclasses as nodes


def _fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _children_fields(cls: type) -> list[str]:
    """Names of the fields that are subtrees; fields with metadata {"static": True} belong to the treedef."""
    return [f.name for f in _fields(cls) if not f.metadata.get("static")]


@dataclass_transform(frozen_default=True)
def pytree(cls: type[C]) -> type[C]:
    """Make a class a frozen dataclass, if it is no dataclass yet, and a node of pytrees, here and in torch.

    Fields are subtrees, except those with metadata {"static": True}, which must be hashable. An annotation may be a
    spec string, see `specs_of`. Unflattening does not call __init__.

    >>> @pytree
    ... class Block:
    ...     w: "d f/tp"
    ...     b: "f/tp"
    >>> flatten_with_paths([Block(1, 2)])[:2]
    (['0.w', '0.b'], [1, 2])
    """
    if "__dataclass_fields__" not in cls.__dict__:
        cls = dataclasses.dataclass(frozen=True)(cls)
    names = _children_fields(cls)
    static = [f.name for f in _fields(cls) if f.metadata.get("static")]

    def take_apart(x: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(x, n) for n in names], tuple(getattr(x, n) for n in static)

    def with_keys(x: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        return [(torch.utils._pytree.GetAttrKey(n), getattr(x, n)) for n in names], take_apart(x)[1]

    def put_together(subtrees: Any, constants: Any) -> Any:
        return _instance(cls, dict(zip([*names, *static], [*subtrees, *constants])))

    torch.utils._pytree.register_pytree_node(
        cls,
        take_apart,
        put_together,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )
    return cls


def _instance(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance with these fields, made without __init__: leaves may be anything, not only what __init__ accepts."""
    x: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(x, name, value)
    return x


def specs_of(tree: Any) -> Any:
    """The specs that a tree's dataclasses, or one dataclass, state in the annotations of their fields.

    An annotation is a spec when it is a string that names no type (`w: "d f/tp"`), or is `Annotated[Tensor, "d f/tp"]`.
    Gives a prefix tree of specs, with None where nothing is stated. Raises TypeError for a class with a field that
    holds several nodes, such as `list[Block]`: only a tree knows how many.

    >>> @pytree
    ... class Block:
    ...     w: "d f/tp"
    ...     b: Annotated[Any, "f/tp"]
    >>> specs_of({"blocks": [Block(1, 2)], "step": 0})
    {'blocks': [Block(w='d f/tp', b='f/tp')], 'step': None}
    """
    if isinstance(tree, type):
        return _instance(tree, {f.name: _spec_of_field(tree, f) for f in _fields(tree)})
    if is_leaf(tree):
        return None
    if dataclasses.is_dataclass(tree):
        stated = {f.name: _stated_spec(type(tree), f) for f in _fields(tree)}
        found = {
            n: specs_of(getattr(tree, n)) if stated[n] is None else stated[n] for n in _children_fields(type(tree))
        }
        return _instance(type(tree), {**vars(tree), **found})
    _, treedef = optree.tree_flatten(tree, is_leaf=lambda x: x is not tree, **_OPTIONS)
    return unflatten(treedef, [specs_of(c) for c in children(tree)])


def _spec_of_field(cls: type, f: dataclasses.Field[Any]) -> Any:
    """The spec that a field states, or the specs of the dataclass that it holds."""
    spec = _stated_spec(cls, f)
    kind = _evaluated(cls, f.type)
    if spec is not None or f.metadata.get("static"):
        return spec
    if any(dataclasses.is_dataclass(a) for a in get_args(kind)):
        raise TypeError(f"specs_of: {cls.__name__}.{f.name} holds several nodes; pass a tree instead of the class.")
    return specs_of(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _stated_spec(cls: type, f: dataclasses.Field[Any]) -> str | None:
    """The spec in the annotation of a field."""
    kind = _evaluated(cls, f.type)
    if get_origin(kind) is Annotated:
        return next((a for a in get_args(kind)[1:] if isinstance(a, str)), None)
    return kind if isinstance(kind, str) else None


def _evaluated(cls: type, annotation: Any) -> Any:
    """The type that an annotation names, or the spec that it is, as a string.

    With `from __future__ import annotations` every annotation is a string, and specs are quoted once more.
    """
    names = vars(sys.modules[cls.__module__])
    if not isinstance(annotation, str):
        return annotation
    try:
        kind = eval(annotation, dict(names))
    except Exception:  # no Python expression, so no type, unless its names are out of reach
        return Any if names.get("annotations") is __future__.annotations else annotation
    return kind if kind is None or isinstance(kind, (type, str)) or get_origin(kind) else annotation


# ---- prefix trees


def broadcast_prefix(
    prefix: Any, tree: Any, stands_whole: Callable[[Any], bool] = lambda x: False, what: str = "The specs"
) -> list[Any]:
    """For each leaf of `tree`, the leaf of `prefix` that stands over it.

    A leaf of the prefix, and a node for which `stands_whole` is true, stands for the whole subtree at its place.
    Lists and tuples match each other, dicts match by key in any order. Raises ValueError naming the path.

    >>> broadcast_prefix({"a": "x", "b": "y"}, {"b": 1, "a": [2, 3]})
    ['y', 'x', 'x']
    """
    found: list[Any] = []

    def walk(above: Any, below: Any, path: str) -> None:
        if stands_whole(above) or is_leaf(above):
            found.extend([above] * len(flatten(below)[0]))
            return
        kind, other = _kind(above), _kind(below)
        if kind != other:
            raise ValueError(_mismatch(what, path, f"are {kind}", f"the tree has {other} there"))
        subtrees, nodes = dict(_items(above)), _items(below)
        missing = [k for k, _ in nodes if k not in subtrees]
        extra = [k for k in subtrees if k not in dict(nodes)]
        if missing or extra:
            problem = [f"say nothing about {one_line(missing[:5])}"] if missing else []
            problem += [f"name {one_line(extra[:5])}, which the tree does not have"] if extra else []
            raise ValueError(
                _mismatch(what, path, " and ".join(problem), f"the tree has {one_line(list(dict(nodes)))}")
            )
        for step, node in nodes:
            walk(subtrees[step], node, f"{path}.{step}" if path else step)

    walk(prefix, tree, "")
    return found


def _kind(tree: Any) -> str:
    """What a node is, in words; nodes of one kind match."""
    if is_leaf(tree):
        return f"a leaf ({type(tree).__name__})"
    if isinstance(tree, Mapping):
        return "a dict"
    if type(tree) in (list, tuple):
        return "a list or tuple"
    return f"a {type(tree).__name__}"


def _mismatch(what: str, path: str, problem: str, there: str) -> str:
    where = f"at '{path}' " if path else ""
    return f"{what} {where}{problem}, but {there}. Specs form a prefix of the tree."
