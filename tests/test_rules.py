"""Factor rules say the truth: every sharding they admit is run and compared, and wrong rules are found out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from op_samples import FROM_SCHEMA, SAMPLES, Sample, pointwise_ops, s, t
from rule_machine import Wrong, check, equation
from rule_mutants import mutants

from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.rules import factory, fft, linalg, loss, matmul, pointwise, reduce, rule_for, shape, view
from vescale_fn.sharding.rules.notation import RuleError
from vescale_fn.sharding.rules.registry import bound_args, form, operand_slots, parse_rule
from vescale_fn.sharding.rules.rule import Rule

aten = torch.ops.aten


def rule_of(op: object, *args: object, **kwargs: object) -> Rule:
    rule = rule_for(equation(s(op, *args, **kwargs)))
    assert rule is not None
    return rule


# --- the machine --------------------------------------------------------------------------------------------------

ALL = [*SAMPLES, *(sample for sample in FROM_SCHEMA if sample is not None)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sample", ALL, ids=str)
def test_every_sharding_a_rule_admits_gives_the_whole_result(sample: Sample) -> None:
    rule = rule_for(equation(sample))
    assert rule is not None
    check(sample, rule)


def test_every_operation_with_a_rule_has_a_sample() -> None:
    families = (pointwise, reduce, matmul, view, shape, factory, fft, linalg, loss)
    without = {op for family in families for op in family.ENTRIES} - {sample.op for sample in ALL}
    assert without == {aten.empty.memory_format}  # whose values are arbitrary


def test_every_pointwise_operation_has_a_sample() -> None:
    assert {str(op) for op in pointwise_ops()} - {str(sample.op) for sample in ALL} == set()


# Mutants that survive, and why: (reason, mutation, operations).
_SURVIVORS = [
    (
        "Multiplied by what is never negative, maxima and minima pass too; the rule claims sums only.",
        "0 passes through",
        """masked_fill.Scalar threshold_backward hardtanh_backward hardsigmoid_backward leaky_relu_backward elu_backward
        softplus_backward hardshrink_backward softshrink_backward native_dropout_backward logit_backward deg2rad
        rad2deg ldexp.Tensor __lshift__.Tensor
        __lshift__.Scalar bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar""",
    ),
    ("True but for integers that wrap.", "0 passes through", "_to_copy"),
    ("Between bools add is `or`, which maxima and minima pass.", "passes through", "add.Tensor"),
    ("`any` of maxima, `all` of minima, and of one element both.", "passes through", "any any.dims all all.dim"),
    ("The sum of a scalar is the scalar.", "0 passes through", "sum"),
    ("True but for NaN, which sums must not hide.", "linear in [0]", "nansum nan_to_num"),
    ("True but for NaN.", "0 passes through", "nan_to_num"),
    ("True but for the last bit.", "linear in", "nextafter"),
    ("True but for the last bit.", "passes through", "nextafter"),
    ("True but where the logarithm is infinite.", "linear in [0]", "special_xlog1py xlogy.Tensor"),
    (
        "True but where the logarithm is infinite.",
        "0",
        "special_xlog1py.other_scalar xlogy.Scalar_Other",
    ),
    (
        "Of the second operand only the shape is read.",
        "linear in [0, 1]",
        """reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward""",
    ),
    ("Linear in the difference, too.", "linear in [1, 2]", "mse_loss_backward"),
    ("For p = 2 linear in the difference, too.", "linear in [1, 2]", "_cdist_backward"),
    (
        "Linear in the weights of the elements, too.",
        "linear in",
        "binary_cross_entropy_with_logits binary_cross_entropy binary_cross_entropy_backward",
    ),
    ("These weights are multiplied by what is never negative.", "2 passes through", "binary_cross_entropy"),
    ("The first operand is overwritten.", "linear in [0, 1]", "copy fill.Tensor"),
    ("The first operand has no elements.", "linear in [1, 2]", "cat"),
    ("One tensor alone is what comes out.", "0 passes through", "cat"),
    ("The identity matrix is symmetric.", "swap a and b", "eye"),
]


@pytest.mark.filterwarnings("ignore")
def test_the_machine_kills_mutants_of_rules() -> None:
    rows = [(name, mutation, reason) for reason, mutation, names in _SURVIVORS for name in names.split()]
    made, explained = 0, Counter[tuple[str, str, str]]()
    unexplained: list[str] = []
    for sample in ALL:
        eqn = equation(sample)
        if any(0 in v.shape for v in eqn.outs):
            continue  # no elements, nothing to go wrong
        rule = rule_for(eqn)
        assert rule is not None
        for mutant in mutants(eqn, rule):
            made += 1
            try:
                check(sample, mutant.rule)
            except Wrong:
                continue
            name = str(sample.op).removeprefix("aten.").removesuffix(".default")
            reasons = [row for row in rows if row[0] == name and row[1] in mutant.what]
            explained.update(reasons[:1])
            unexplained += [f"{sample}: {rule}: {mutant.what}"] if not reasons else []
    assert unexplained == []
    assert set(rows) == set(explained)
    assert made >= 3000
    assert explained.total() / made <= 0.01


def test_a_mistake_is_named() -> None:
    sample = s(aten.softmax.int, t(4, 6), 1)
    with pytest.raises(Wrong, match=r"softmax.int \[4, 6\] by 'a b -> a b' .* with b over 2 ranks"):
        check(sample, parse_rule("a b -> a b", equation(sample)))


# --- notation -----------------------------------------------------------------------------------------------------


def test_letters_are_bound_to_shapes() -> None:
    rule = parse_rule("b m k, b k n -> b m n", ([(2, 3, 4), (2, 4, 5)], [(2, 3, 5)]))
    assert rule.operands == ((("b",), ("m",), ("k",)), (("b",), ("k",), ("n",)))
    assert rule.sizes == {"b": 2, "m": 3, "k": 4, "n": 5}


def test_ellipsis_aligns_from_the_right_and_ones_broadcast() -> None:
    assert str(parse_rule("..., ... -> ...", ([(2, 1, 3), (4, 3)], [(2, 4, 3)]))) == "a 1 c, b c -> a b c"


def test_ellipsis_takes_letters_that_are_free() -> None:
    assert str(parse_rule("a ... -> ... a", ([(2, 3, 4)], [(3, 4, 2)]))) == "a b c -> b c a"


def test_groups_need_all_sizes_but_one() -> None:
    assert parse_rule("(b t) d -> b t d", ([(12, 5)], [(3, 4, 5)])).sizes == {"d": 5, "b": 3, "t": 4}
    assert parse_rule("(k d) -> d", ([(12,)], [(4,)])).sizes == {"d": 4, "k": 3}


def test_results_do_not_broadcast() -> None:
    with pytest.raises(RuleError, match=r"\[3\] -> \[1\]: 'a' has size 3 and 1"):
        parse_rule("a -> a", ([(3,)], [(1,)]))


def test_factors_of_size_one_disappear() -> None:
    rule = parse_rule("(!k d) -> d", ([(4,)], [(4,)]))
    assert str(rule) == "d -> d"
    assert rule.whole == frozenset()


def test_operands_may_be_named_and_absent() -> None:
    entry = form("input: b !c, weight: !c, bias: !c -> b !c", linear=[{"input", "bias"}])
    x, w = Var("x", (2, 3), torch.float64), Var("w", (3,), torch.float64)

    def norm(input: object, weight: object = None, bias: object = None) -> None: ...

    assert str(entry(Eqn(norm, (x, w), {}, (x,)))) == "b !c, !c -> b !c"
    assert entry(Eqn(norm, (x, w), {}, (x,))).linear == ()
    assert entry(Eqn(norm, (x, w, w), {}, (x,))).linear == (frozenset({0, 2}),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "The rule 'a b' has no '->'; write operands '->' results, as in 'm k, k n -> m n'."),
        ("(a b -> a", "The rule '(a b -> a' has a '(' without ')' in '(a b'."),
        ("a) b -> a", "The rule 'a) b -> a' has an unexpected ')' in 'a) b'."),
        ("a; b -> a", "The rule 'a; b -> a' has an unexpected ';' in 'a; b'."),
        ("... a ... -> a", "The rule '... a ... -> a' has more than one '...' in '... a ...'."),
        (
            "a b, a -> a b",
            "The rule 'a b, a -> a b' does not fit [2, 3] -> [2, 3]: it covers 2 tensor operands where there are 1.",
        ),
        (
            "a b -> a b, a",
            "The rule 'a b -> a b, a' does not fit [2, 3] -> [2, 3]: it states 2 results where there are 1.",
        ),
        ("a -> a", "The rule 'a -> a' does not fit [2, 3] -> [2, 3]: 'a' does not have the 2 dims of [2, 3]."),
        ("a b -> b a", "The rule 'a b -> b a' does not fit [2, 3] -> [2, 3]: 'b' has size 3 and 2."),
        (
            "(x y) b -> a b",
            "The rule '(x y) b -> a b' does not fit [2, 3] -> [2, 3]: the sizes of x and y in '(x y)' are not known.",
        ),
    ],
)
def test_a_rule_that_does_not_fit_says_why(text: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        parse_rule(text, ([(2, 3)], [(2, 3)]))
    assert str(error.value) == message


def test_a_named_rule_must_cover_every_tensor() -> None:
    eqn = equation(s(aten.addmm.default, t(4), t(4, 6), t(6, 4)))
    message = (
        r"does not fit aten.addmm of \[4\], \[4, 6\], \[6, 4\] -> \[4, 4\]: the tensor operand 'self' has no letters."
    )
    with pytest.raises(RuleError, match=message):
        parse_rule("mat1: m k, mat2: k n -> m n", eqn)


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args", "text"),
    [
        (aten.mm.default, (t(4, 6), t(6, 5)), "m k, k n -> m n"),
        (aten.addmm.default, (t(5), t(4, 6), t(6, 5)), "n, m !k, !k n -> m n"),
        (aten.add.Tensor, (t(4, 6), t(6)), "a b, b -> a b"),
        (aten.exp.default, (t(4, 1),), "a 1 -> a 1"),
        (aten.sum.dim_IntList, (t(4, 6), [1], True), "a b -> a 1"),
        (aten.argmax.default, (t(4, 6), 1), "a !b -> a"),
        (aten.view.default, (t(2, 3, 5), [6, 5]), "a b c -> (a b) c"),
        (aten.view.default, (t(6, 4), [4, 6]), "(a !b) !e -> (a !c) !d"),
        (aten.expand.default, (t(4, 1), [2, 4, 3]), "b 1 -> a b c"),
        (aten.split.Tensor, (t(5, 12), 4, 1), "a (!piece within) -> a within, a within, a within"),
        (aten.cat.default, ([t(5, 4), t(5, 4)], 1), "a within, a within -> a (!piece within)"),
        (aten.slice.Tensor, (t(5, 12), 1, 4, 8), "a (!piece within) -> a within"),
        (aten.slice.Tensor, (t(5, 12), 1, 3, 9), "a !full -> a !part"),
        (
            aten.repeat.default,
            (
                t(
                    4,
                ),
                [2, 3],
            ),
            "a -> !copy0 (!copy1 a)",
        ),
        (aten.full.default, ([4, 5], 1.0), " -> a b"),
        (aten._fft_r2c.default, (t(4, 6), [1], 0, True), "a !b -> a !frequency1"),
    ],
)
def test_rules_read_as_notation(op: object, args: tuple[object, ...], text: str) -> None:
    assert str(rule_of(op, *args)) == text


def test_sums_pass_what_is_linear_and_nothing_else() -> None:
    both, each = (frozenset({0, 1}),), (frozenset({0}), frozenset({1}))
    assert rule_of(aten.add.Tensor, t(4), t(4)).linear == both
    assert rule_of(aten.add.Tensor, t(4), 10).linear == ()
    assert rule_of(aten.mul.Tensor, t(4), t(4)).linear == each
    assert rule_of(aten.mul.Tensor, t(4), 0.5).linear == (frozenset({0}),)
    assert rule_of(aten.div.Tensor, t(4), t(4)).linear == (frozenset({0}),)
    assert rule_of(aten.clamp.default, t(4), 0, 1).linear == ()
    assert rule_of(aten.div.Tensor_mode, t(4), 2, rounding_mode="floor").linear == ()


def test_casts_that_round_are_not_linear() -> None:
    assert rule_of(aten._to_copy.default, t(4), dtype=torch.float32).linear == (frozenset({0}),)
    assert rule_of(aten._to_copy.default, t(4), dtype=torch.int64).linear == ()
    assert rule_of(aten._to_copy.default, t(4), dtype=torch.bool).linear == ()
    assert rule_of(aten.add.Tensor, t(4, dtype=torch.bool), t(4, dtype=torch.bool)).linear == ()


def test_a_number_may_stand_for_a_tensor() -> None:
    out = Var("y", (), torch.float64)
    assert rule_for(Eqn(aten._to_copy.default, (6,), {"dtype": torch.float64}, (out,))) == Rule(
        (), ((),), {}, merges="alike"
    )


def test_zeros_are_a_partial_sum_for_free() -> None:
    assert rule_of(aten.zeros.default, [4]).linear == (frozenset(),)
    assert rule_of(aten.full.default, [4], 0.0).linear == (frozenset(),)
    assert rule_of(aten.full.default, [4], 1.0).linear == ()


def test_maxima_are_pending_as_maxima() -> None:
    assert rule_of(aten.amax.default, t(4, 6), [1]).reduces == {"b": "max"}
    assert rule_of(aten.all.default, t(4, dtype=torch.bool)).reduces == {"a": "min"}


def test_an_operation_without_a_rule_has_none() -> None:
    assert rule_for(equation(s(aten.bincount.default, t(4, dtype=torch.int64, low=0)))) is None


def test_rules_of_the_user_come_first() -> None:
    eqn = equation(s(aten.exp.default, t(4, 6)))
    assert str(rule_for(eqn, {aten.exp.default: form("a !b -> a !b")})) == "a !b -> a !b"


def test_arguments_by_name() -> None:
    eqn = equation(s(aten.sum.dim_IntList, t(4, 6), [1]))
    assert bound_args(eqn) == {"self": eqn.operands[0], "dim": [1], "keepdim": False, "dtype": None}
    cat = equation(s(aten.cat.default, [t(4), t(4)]))
    assert operand_slots(cat) == {"tensors": (0, 1)}
