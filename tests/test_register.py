"""Rules from users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import vescale_fn as vf
from vescale_fn import register
from vescale_fn.sharding.rules.notation import RuleError

MESH = vf.make_mesh(dp=2)
X = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`torch.ops.rules_test`, operations that nobody has a rule for, and an empty registry."""
    monkeypatch.setattr(register, "_REGISTERED", {})
    lib = torch.library.Library("rules_test", "DEF")
    lib.define("spread(Tensor x) -> Tensor")
    lib.define("spread.scaled(Tensor x, float by) -> Tensor")
    for name, impl in {"spread": lambda x: x - x.mean(-1, True), "spread.scaled": lambda x, by: x * by}.items():
        lib.impl(name, impl, "CompositeExplicitAutograd")
    yield torch.ops.rules_test
    lib._destroy()


def spec_of(f: Any) -> str:
    out = f(vf.device_put(X, "b/dp d", MESH))
    torch.testing.assert_close(out.full(), f.fn(X))
    return str(out.sharding.spec)


def test_a_rule_keeps_the_sharding(library: Any) -> None:
    f = vf.pjit(lambda x: library.spread(x).t())
    assert "has no rule" in str(f.lower(vf.device_put(X, "b/dp d", MESH)).plan.messages)
    assert spec_of(f) == "a b"
    vf.register_rule(library.spread.default, "b !d -> b !d")
    assert spec_of(vf.pjit(lambda x: library.spread(x).t())) == "a b/dp"


def test_a_packet_means_all_its_overloads(library: Any) -> None:
    vf.register_rule(library.spread, "b !d -> b !d", linear=[[0]])
    assert set(register.registered_rules()) == {library.spread.default, library.spread.scaled}
    assert spec_of(vf.pjit(lambda x: library.spread(x, 2.0).t())) == "a b/dp"


def test_linear_operations_let_sums_through(library: Any) -> None:
    vf.register_rule(library.spread.scaled, "b d -> b d", linear=[[0]])
    f = vf.pjit(lambda x: library.spread(x @ x.t(), 2.0).sum())
    x = vf.device_put(X, "b d/dp", MESH)
    (row,) = f.lower(x).collectives
    assert row.shape == ()
    torch.testing.assert_close(f(x).full(), f.fn(X))


def test_rules_of_one_step(library: Any) -> None:
    f = vf.pjit(lambda x: library.spread(x).t(), rules={library.spread: "b !d -> b !d"})
    assert spec_of(f) == "a b/dp"
    assert register.registered_rules() == {}


def test_malformed_rules_are_errors_where_they_are_written(library: Any) -> None:
    with pytest.raises(RuleError, match="has no '->'; write operands '->' results"):
        vf.register_rule(library.spread, "b !d")
    with pytest.raises(RuleError, match="has no '->'"):
        vf.pjit(lambda x: x, rules={library.spread: "b"})
    with pytest.raises(TypeError) as e:
        vf.register_rule(torch.cumsum, "b !d -> b !d")
    assert str(e.value) == (
        f"vf.register_rule: {torch.cumsum!r} is not an operation of torch.ops. "
        "Rules belong to what a trace records: pass torch.ops.<library>.<name> or one of its overloads."
    )
