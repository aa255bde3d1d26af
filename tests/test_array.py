"""Arrays: what they print without communicating, parts that nobody can damage, and torch functions outside a step."""

from __future__ import annotations

import copy
import operator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vescale_fn as vf
from vescale_fn import engines, lift, move
from vescale_fn.array import Array, ArrayType

MESH = vf.make_mesh(dp=2, tp=2)


def put(x: Any, spec: str = "b/dp d", mesh: Any = MESH, **sizes: int) -> Array:
    out: Array = vf.device_put(torch.as_tensor(x), spec, mesh, **sizes)
    return out


def grid(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, neither an operation nor a move can run."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("this must not run anything")

    monkeypatch.setattr(lift, "apply", refuse)
    monkeypatch.setattr(move, "move_to", refuse)
    monkeypatch.setattr(engines, "engine_for", refuse)


# ---- text


def test_whole_values_print_without_a_part(silent: None) -> None:
    assert repr(put([1.0, 2.5], "d")) == "Array(f32[2] 'd' on dp=2,tp=2; [1, 2.5])"


def test_sharded_values_print_the_part_of_the_first_rank(silent: None) -> None:
    assert repr(put(grid(4, 2), "rows/dp d")) == (
        "Array(f32[4, 2] 'rows/dp d' on dp=2,tp=2; rank 0 [0:2, :] [[0, 1],\n [2, 3]])"
    )


def test_a_process_with_one_rank_says_so(silent: None) -> None:
    mesh = vf.Mesh(MESH.shape, "torchdist", processes=4, process=3)
    x = put(grid(4, 6), "(2 b/dp) d/tp")
    here = Array(ArrayType(x.layout, x.dtype, mesh), [x.shards[3]])
    assert repr(here) == (
        "Array(f32[4, 6] '(2 a/dp) b/tp' on dp=2,tp=2; this process [1:2+3:4, 3:6] [[9, 10, 11],\n [21, 22, 23]])"
    )


def test_at_most_six_values_a_side(silent: None) -> None:
    text = repr(put(grid(10, 10), "a b"))
    assert text == (
        "Array(f32[10, 10] 'a b' on dp=2,tp=2; [[0, 1, 2, ..., 7, 8, 9],\n [10, 11, 12, ..., 17, 18, 19],\n"
        " [20, 21, 22, ..., 27, 28, 29],\n ...,\n [70, 71, 72, ..., 77, 78, 79],\n [80, 81, 82, ..., 87, 88, 89],\n"
        " [90, 91, 92, ..., 97, 98, 99]])"
    )


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        (torch.tensor(1.0), "", "f32[] '' on dp=2,tp=2; 1"),
        (torch.tensor([True]), "b", "bool[1] 'b' on dp=2,tp=2; [True]"),
        (torch.tensor([1 << 40]), "b", "i64[1] 'b' on dp=2,tp=2; [1099511627776]"),
        (torch.tensor([float("nan"), 0.1], dtype=torch.bfloat16), "b", "bf16[2] 'b' on dp=2,tp=2; [nan, 0.1001]"),
        (torch.tensor([1 - 2j]), "b", "c64[1] 'b' on dp=2,tp=2; [1-2j]"),
        (torch.zeros(0, 3), "b/dp d", "f32[0, 3] 'b/dp d' on dp=2,tp=2; rank 0 [:, :] []"),
        (torch.ones(1, 1), "b~/dp d", "f32[1, 1] 'b~/dp d' on dp=2,tp=2; rank 0 [:, :] [[1]]"),
        (torch.ones(2), "b {sum: dp}", "f32[2] 'b {sum: dp}' on dp=2,tp=2; rank 0 [:] [1, 1]"),
    ],
)
def test_every_kind_of_value_prints(value: torch.Tensor, spec: str, text: str, silent: None) -> None:
    assert repr(put(value, spec)) == f"Array({text})"


def test_flat_cuts_print_the_flat_part(silent: None) -> None:
    assert "rank 0 [0:3] [0, 1, 2])" in repr(put(grid(2, 4), "(a b)~[3 5]/dp"))


def test_sharding_keeps_the_users_names() -> None:
    assert str(put(grid(4, 2), "rows/dp d").sharding) == "NamedSharding(dp=2,tp=2: 'rows/dp d')"


# ---- numbers


def test_numbers_of_whole_values_need_no_communication(silent: None) -> None:
    x = put(2.5, "")
    assert (float(x), int(x), bool(x), x.item(), f"{x:.3f}", x.tolist()) == (2.5, 2, True, 2.5, "2.500", 2.5)
    assert [10, 11, 12][put(1, "")] == 11
    assert f"{x}" == repr(x)
    assert np.asarray(put([1, 2], "b")).tolist() == [1, 2]
    assert np.asarray(put([1, 2], "b"), dtype=np.float32).dtype == np.float32


@pytest.mark.parametrize("read", [float, int, bool, np.asarray, Array.item, Array.tolist, "{:.2f}".format])
@pytest.mark.parametrize("spec", ["b/dp", "b {sum: tp}"])
def test_numbers_of_other_values_name_full(read: Any, spec: str, silent: None) -> None:
    shown = spec.replace("b", "a")
    with pytest.raises(ValueError) as e:
        read(put(grid(2), spec))
    assert str(e.value) == (
        f"The value of this Array (f32[2] '{shown}' on dp=2,tp=2) is spread over ranks, and reading it here would "
        "communicate. Call .full() on every process, then read the result."
    )


def test_several_values_are_no_truth_value() -> None:
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        bool(put(grid(2), "b"))


@pytest.mark.parametrize(
    "spec", ["b d", "b/dp d", "b/tp d/dp", "b/(dp tp) d", "b/(tp dp) d", "(2 b/dp) d", "b~/dp d~/tp", "b d {sum: dp}"]
)
def test_full_is_the_value(spec: str) -> None:
    x = grid(8, 4)
    a = put(x, spec)
    assert torch.equal(a.full(), x)
    a.full().zero_()
    assert torch.equal(a.full(), x)


# ---- parts


def test_shards_say_which_part_they_are() -> None:
    x = grid(8, 4)
    shards = put(x, "(2 b/dp) d/tp").addressable_shards
    assert [s.rank for s in shards] == [0, 1, 2, 3]
    assert shards[1].coords == {"dp": 0, "tp": 1}
    assert shards[1].index == ((slice(0, 2), slice(4, 6)), slice(2, 4))
    assert torch.equal(shards[1].data, torch.cat([x[0:2], x[4:6]])[:, 2:4])


def test_writing_to_a_shard_changes_nothing() -> None:
    a = put(grid(4, 2))
    handed = [s.data for s in a.addressable_shards]
    for data in handed:
        data.fill_(-1)
    assert torch.equal(a.full(), grid(4, 2))
    step = vf.pjit(lambda x: x * 2, donate_argnums=0)
    assert torch.equal(step(a).full(), 2 * grid(4, 2))
    assert all(bool((data == -1).all()) for data in handed)


def test_shards_are_no_copies_until_written() -> None:
    a = put(grid(4, 2))
    (data, *_) = (s.data for s in a.addressable_shards)
    assert torch._C._data_address(data) == torch._C._data_address(a.shards[0])


def test_arrays_are_immutable() -> None:
    with pytest.raises(TypeError, match=r"^Arrays are immutable. Make a new one: torch.where\(mask, new, x\), "):
        put(grid(2), "b")[0] = 1.0


def test_dead_arrays_print_and_tell() -> None:
    a = put(grid(4, 2))
    vf.pjit(lambda x: x + 1, donate_argnums=0)(a)
    assert a.is_deleted
    assert repr(a) == "Array(f32[4, 2] 'b/dp d' on dp=2,tp=2; donated to <lambda>)"
    with pytest.raises(RuntimeError) as e:
        a.full()
    assert str(e.value) == (
        "This Array (f32[4, 2] 'a/dp b' on dp=2,tp=2) was donated to <lambda>: it holds nothing any more. "
        "Use the value that the call returned, or leave the argument out of donate_argnums."
    )


def test_arrays_copy() -> None:
    a = put(grid(4, 2))
    assert torch.equal(copy.deepcopy(a).full(), a.full())


def test_types_are_equal_when_arrays_are_alike() -> None:
    a, b, c = put(grid(4, 2)), put(grid(4, 2), "x/dp y"), put(grid(4, 2), "b d")
    assert a.type == b.type
    assert hash(a.type) == hash(b.type)
    assert a.type != c.type


# ---- torch functions outside a step

X = torch.linspace(-2, 2, 32, dtype=torch.float64).reshape(8, 4)
Y = torch.linspace(0.5, 3, 32, dtype=torch.float64).reshape(8, 4)
BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip


def same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert isinstance(got, Array)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.full(), want, equal_nan=True)
    elif isinstance(want, tuple | list):
        for g, w in zip(got, want, strict=True):
            same(g, w)
    else:
        assert got == want


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_operators(op: Any) -> None:
    x, y = put(X), put(Y, "b d/tp")
    same(op(x, y), op(X, Y))
    same(op(x, 2.0), op(X, 2.0))
    same(op(2.0, y), op(2.0, Y))
    same(op(X, y), op(X, Y))
    same(op(x, Y), op(X, Y))


@pytest.mark.parametrize("op", [operator.and_, operator.or_, operator.xor], ids=lambda op: op.__name__)
def test_bit_operators(op: Any) -> None:
    a, b = torch.arange(8) % 3 > 0, torch.arange(8) % 2 > 0
    same(op(put(a, "b/dp"), put(b, "b")), op(a, b))
    same(op(put(a, "b/dp"), True), op(a, True))
    same(op(True, put(a, "b/dp")), op(True, a))


FUNCTIONS = {
    "neg": lambda x: -x,
    "abs": abs,
    "invert": lambda x: ~(x > 0),
    "matmul": lambda x: x @ x.T,
    "softmax": lambda x: torch.softmax(x, 0),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(dim=1, keepdim=True),
    "max": lambda x: tuple(x.max(dim=0)),
    "slice": lambda x: x[1:3],
    "index": lambda x: x[..., None, -1],
    "rows": lambda x: x[torch.tensor([0, 3])],
    "mask": lambda x: torch.where(x > 0, x, 0.0),
    "transpose": lambda x: x.t(),
    "property": lambda x: x.mT,
    "gelu": F.gelu,
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "einsum": lambda x: torch.einsum("bd,bd->", x, x),
    "cat": lambda x: torch.cat([x, x], dim=1),
    "unpack": lambda x: tuple(x)[:2],
    "zeros_like": torch.zeros_like,
    "convert": lambda x: x.float(),
    "reshape": lambda x: x.reshape(2, 4, 4),
    "keywords": lambda x: torch.sum(input=x, dim=0),
    "a number": lambda x: x.is_floating_point(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("spec", ["b/dp d", "b/tp d/dp", "b d"])
def test_functions(name: str, spec: str) -> None:
    same(FUNCTIONS[name](put(X, spec)), FUNCTIONS[name](X))


def test_functions_are_lowered_once() -> None:
    lift._one_operation.cache_clear()
    for _ in range(3):
        torch.hypot(put(X), put(Y))
    info = lift._one_operation(torch.hypot).cache_info()
    assert (info.misses, info.hits) == (1, 2)


def test_results_stay_sharded() -> None:
    assert str((put(X) + 1).sharding) == "NamedSharding(dp=2,tp=2: 'b/dp d')"


def test_adding_in_place_makes_a_new_array() -> None:
    x = before = put(X)
    x += 1
    same(x, X + 1)
    same(before, X)


def test_functions_also_run_where_pjit_is_disabled() -> None:
    with vf.disable_pjit():
        same(put(X) + 1, X + 1)


def test_hash_is_identity() -> None:
    x, y = put(X), put(X)
    assert len({x, y, x}) == 2


def test_len_and_iteration() -> None:
    x = put(X)
    assert len(x) == 8
    same(list(x), list(X))
    with pytest.raises(TypeError, match=r"^len\(\) of a 0-d Array.$"):
        len(x.sum())
    with pytest.raises(TypeError, match=r"^Iteration over a 0-d Array.$"):
        iter(x.sum())


def test_unknown_attributes() -> None:
    with pytest.raises(AttributeError, match=r"^Array has no attribute 'flatmap'.$"):
        put(X).flatmap  # noqa: B018
    assert not hasattr(put(X), "requires_grad")


# ---- abstract meshes


def test_arrays_on_an_abstract_mesh_have_types_only() -> None:
    mesh = vf.abstract_mesh(dp=512, tp=8)
    x = vf.device_put(vf.ShapeDtype((1 << 40, 64)), "b/dp d/tp", mesh)
    assert repr(x) == "Array(f32[1099511627776, 64] 'b/dp d/tp' on dp=512,tp=8; no values)"
    assert x.addressable_shards == []
    assert repr((x + 1).sum(1)) == "Array(f32[1099511627776] 'a/dp' on dp=512,tp=8; no values)"
    for read in (Array.full, Array.item, float):
        with pytest.raises(ValueError) as e:
            read(x)
        assert str(e.value) == (
            "This Array (f32[1099511627776, 64] 'a/dp b/tp' on dp=512,tp=8) lives on an abstract mesh: it has a shape "
            "and a sharding, but no values. Use vf.make_mesh and vf.device_put for Arrays that hold something."
        )
