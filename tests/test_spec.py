"""The grammar of specs: what is read, how it is printed, and where the caret stands when it cannot be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fn.sharding.forms import P, S, as_spec
from vescale_fn.sharding.grammar import parse, parse_expr
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.spec import ELLIPSIS, Cut, Entry, Expr, Factor, Group, Spec, SpecError

MESH = MeshShape(("dp", "tp"), (2, 4))

NAMES = [f"n{i}" for i in range(6)] + ["b", "batch", "d_model", "K2"]
AXES = ["dp", "tp", "x", "y", "z", "fsdp_2"]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any tree that the static rules allow."""
    names = draw(st.permutations(NAMES))
    axes = draw(st.permutations(AXES))

    def some_axes() -> tuple[str, ...]:
        if draw(st.integers(0, 9)) == 0:
            return ("?",)
        return tuple(axes.pop() for _ in range(min(draw(st.integers(0, 2)), len(axes))))

    def cut(its_axes: tuple[str, ...]) -> Cut | None:
        units = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any).map(lambda u: Cut(units=tuple(u)))
        kinds = [st.none(), st.just(Cut())]
        if len(its_axes) == 1 and its_axes != ("?",):
            kinds += [units, st.builds(Cut, owner=st.integers(0, 9)), st.builds(Cut, name=st.sampled_from(["u", "v"]))]
        return draw(st.one_of(kinds)) if its_axes else None

    def factor(sharded: bool = True) -> Factor:
        its_axes = some_axes() if sharded else ()
        kind = draw(st.sampled_from(["name", "sized", "int", "any"] if not its_axes else ["name", "sized", "int"]))
        if kind == "any":
            return Factor("_")
        size = draw(st.integers(2, 99)) if kind != "name" else None
        return Factor("" if kind == "int" else names.pop(), size, cut(its_axes), its_axes)

    dims: list[Factor | Group | str] = []
    for kind in draw(st.lists(st.sampled_from(["factor", "factor", "group", "..."]), max_size=3)):
        if kind == "factor":
            dims.append(factor())
        elif kind == "group":
            its_axes = some_axes()
            factors = tuple(
                factor(sharded=not its_axes) for _ in range(draw(st.integers(2, 3)) if len(names) > 6 else 2)
            )
            dims.append(Group(factors, cut(its_axes), its_axes))
        elif ELLIPSIS not in dims:
            dims.append(ELLIPSIS)
    state = tuple(
        Entry(k, (axes.pop(),)) for k in draw(st.permutations(["sum", "max"])) if axes and draw(st.booleans())
    )
    if axes and draw(st.booleans()):
        state += (Entry("at", (axes.pop(),), draw(st.integers(0, 3))),)
    return Spec(tuple(dims), state)  # type: ignore[arg-type]


@given(specs())
def test_parsing_what_was_printed_gives_the_tree_back(spec: Spec) -> None:
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)


@given(specs(), st.integers(0, 3))
def test_spaces_do_not_matter(spec: Spec, n: int) -> None:
    text = str(spec)
    for symbol in "()[]{}/~@,:=":
        text = text.replace(symbol, " " * n + symbol + " " * n)
    assert parse(f"  {text} ") == spec


@given(st.text(alphabet="ab12/~@()[]{}:,=? ._$>-", max_size=12))
def test_any_text_is_a_spec_or_an_error_with_a_caret_inside_it(text: str) -> None:
    error = _error_of(text)
    if error is None:
        assert parse(str(parse(text))) == parse(text)
    else:
        assert 0 <= error.at <= len(text)
        assert str(error).splitlines()[-1] == "  " + " " * error.at + "^"


def _error_of(text: str) -> SpecError | None:
    try:
        parse(text)
    except SpecError as e:
        return e
    return None


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        ("  b/dp   t ", "b/dp t"),
        ("b/(dp)", "b/dp"),
        ("(b)", "b"),
        ("(b)/dp", "b/dp"),
        ("(b/dp)", "b/dp"),
        ("d (qkv h=16/tp k)", "d (qkv h=16/tp k)"),
        ("(d f)~[0 1 5 2]/dp k", "(d f)~[0 1 5 2]/dp k"),
        ("b{sum:tp,sum:dp,at:x@1}", "b {sum: (tp dp), at: x@1}"),
        ("b/? _ 1 3", "b/? _ 1 3"),
        ("... d~/(x y)", "... d~/(x y)"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical


def test_the_tree_of_megatrons_fused_qkv() -> None:
    assert parse("(qkv=3 h/tp k) d").dims == (
        Group((Factor("qkv", 3), Factor("h", axes=("tp",)), Factor("k"))),
        Factor("d"),
    )


BAD = [
    ("b/x/y", 3, "Several axes on one dim stand in parentheses, major to minor: b/(x y)."),
    ("(h b/(x y)/z)", 10, "Several axes on one dim stand in parentheses, major to minor: b/(x y z)."),
    ("a b a", 4, "The name 'a' stands for two dims: names are used once in a layout."),
    ("a/x b/x", 6, "The axis 'x' is used twice: a mesh axis can cut a tensor only once."),
    ("a/x {sum: x}", 10, "The axis 'x' is used twice: a mesh axis can cut a tensor only once."),
    ("... ...", 4, "A layout has at most one '...'."),
    (".../x", 3, "'...' stands for dims that are whole; name the dim to shard it."),
    ("(a ...)", 3, "'...' stands for whole dims and cannot be part of one."),
    ("(a (b c))", 3, "Groups do not nest: list all factors in one pair of parentheses."),
    ("()", 0, "A group has at least one factor; a dim of size 1 is written 1."),
    ("(a/x b)/y", 8, "Either a group is sharded or its factors are, not both."),
    ("1/tp", 2, "A dim of size 1 cannot be sharded."),
    ("_/x", 2, "'_' stands for a whole dim; name the dim to shard it."),
    ("_=3", 1, "'_' stands for any size; use a name to give it one."),
    ("b~", 1, "'~' says how axes cut a dim, so '/axis' must follow it."),
    ("b~[0 0]/x", 3, "Units must not all be 0."),
    ("b~[1 2]/(x y)", 9, "'~[1 2]' names one part for each rank of a single axis."),
    ("b~@1/?", 5, "'~@1' names one part for each rank of a single axis."),
    ("b {prod: x}", 3, "'prod' is no state; use 'sum', 'max', 'min', 'ct' or 'at'."),
    ("b {sum: ?}", 8, "'?' leaves open how a dim is sharded, and no state: name the axes."),
    ("b {sum x}", 7, "Expected ':' after 'sum', found 'x'."),
    ("b {sum: x", 9, "Expected '}' after the states of axes, found the end of the spec."),
    ("b/", 2, "Expected a mesh axis after '/', found the end of the spec."),
    ("b/()", 2, "'/' needs at least one mesh axis."),
    ("b=x", 2, "Expected a size after 'b=', found 'x'."),
    ("(a", 2, "Expected a factor or ')', found the end of the spec."),
    ("a)", 1, "Expected a dim or the end of the spec, found ')'."),
    ("3h", 0, "Unexpected '3': a spec is made of names, sizes and ( ) / ~ { }."),
    ("b $", 2, "Unexpected '$': a spec is made of names, sizes and ( ) / ~ { }."),
]


@pytest.mark.parametrize(("text", "at", "message"), BAD, ids=[t for t, _, _ in BAD])
def test_what_cannot_be_read(text: str, at: int, message: str) -> None:
    with pytest.raises(SpecError) as e:
        parse(text)
    assert str(e.value) == f"{message}\n  {text}\n  {' ' * at}^"


def test_an_unknown_axis_lists_those_that_exist() -> None:
    with pytest.raises(SpecError) as e:
        parse("b/dp (h/tq k)", MESH)
    assert str(e.value) == "There is no mesh axis 'tq': this mesh has dp=2, tp=4.\n  b/dp (h/tq k)\n          ^"


def test_an_error_says_where_it_happened() -> None:
    with pytest.raises(SpecError) as e:
        parse("b $")
    assert str(e.value.within("device_put: params.w")).startswith("device_put: params.w: Unexpected '$'")


def test_expressions() -> None:
    expr = parse_expr("b s f/tp, f/tp d->b s d {sum: tp}")
    assert isinstance(expr, Expr)
    assert str(expr) == "b s f/tp, f/tp d -> b s d {sum: tp}"
    assert expr.contracted == ("f",)
    assert parse_expr("a, ").left == (parse("a"), parse(""))
    assert parse_expr("a").right is None
    with pytest.raises(SpecError, match="found '->'"):
        parse_expr("a -> b -> c")
    with pytest.raises(SpecError, match="There is no mesh axis 'q'"):
        parse_expr("a -> a/q", MESH)


def test_sizes_written_inline() -> None:
    spec = parse("d (qkv h/tp k) f~u/dp").with_sizes({"qkv": 3, "h": 4, "d": 7, "u": (1, 2)})
    assert str(spec) == "d (qkv=3 h=4/tp k) f~[1 2]/dp"


def test_positional_specs() -> None:
    assert P("dp", None) == P("dp")
    assert P(("tp",)) == P("tp")
    assert P(()) == P(None) == P()
    assert P("dp", "tp") != P("tp", "dp")
    assert hash(P("dp", None)) == hash(P("dp"))
    assert repr(P("dp", None, ("tp", "sp"))) == "P('dp', None, ('tp', 'sp'))"
    assert str(P(None, ("tp", "sp")).spec) == "a b/(tp sp) ..."
    with pytest.raises(TypeError, match="P takes axis names, tuples of axis names and None"):
        P((1, 2))  # type: ignore[arg-type]


def test_specs_with_sizes() -> None:
    assert S("(h/tp k)", h=4) == S("(h/tp k)", h=4)
    assert S("(h/tp k)", h=4) != S("(h/tp k)", h=2)
    assert as_spec(S("d~u/dp", u=[1, 2])) == (parse("d~u/dp"), {"u": (1, 2)})
    with pytest.raises(SpecError):
        S("b/x/y")
    with pytest.raises(TypeError, match=r"A spec is a string such as 'b/dp d', a vf.P or a vf.S, not int \(3\)\."):
        as_spec(3)  # type: ignore[arg-type]
