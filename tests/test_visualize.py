"""Pictures of who holds what: exact text, and coloured cells."""

from __future__ import annotations

import torch

import vescale_fn as vf
from vescale_fn.sharding.bind import bind
from vescale_fn.visualize import Picture, visualize

MESH = vf.make_mesh(dp=2, tp=2)


def picture(shape: tuple[int, ...], spec: str) -> Picture:
    return visualize(bind(spec, shape, MESH.shape))


def test_one_dim() -> None:
    assert repr(picture((8,), "b/dp")) == (
        "[8] 'a/dp' on dp=2,tp=2\n"
        "┏━━━━━┳━━━━━━━━━━━┓\n"
        "┃     ┃ held by   ┃\n"
        "┡━━━━━╇━━━━━━━━━━━┩\n"
        "│ 0:4 │ ranks 0-1 │\n"
        "├─────┼───────────┤\n"
        "│ 4:8 │ ranks 2-3 │\n"
        "└─────┴───────────┘"
    )


def test_two_dims_with_a_strided_cut() -> None:
    assert picture((4, 6), "b d").rows == (("0:4", "ranks 0-3"),)
    assert picture((8, 6), "(2 b/dp) d/tp").rows == (
        ("0:2", "rank 0", "rank 1"),
        ("2:4", "rank 2", "rank 3"),
        ("4:6", "rank 0", "rank 1"),
        ("6:8", "rank 2", "rank 3"),
    )
    assert picture((4, 6), "b/tp d").rows == (("0:2", "ranks 0, 2"), ("2:4", "ranks 1, 3"))


def test_more_dims_are_a_table_of_ranks() -> None:
    found = picture((2, 3, 8), "a/dp b (2 c/tp)")
    assert found.columns == ("", "coordinates", "dim 0", "dim 1", "dim 2")
    assert found.rows[1] == ("rank 1", "dp=0, tp=1", "0:1", "0:3", "2:4+6:8")
    assert picture((1, 3, 8), "a~/dp b c").rows[2] == ("rank 2", "dp=1, tp=0", "nothing", "0:3", "0:8")
    assert picture((), "").rows[3] == ("rank 3", "dp=1, tp=1")


def test_empty_and_flat_cuts() -> None:
    assert picture((0, 4), "b/dp d").rows == ()
    assert picture((2, 4), "(a b)~[3 5]/dp").rows == (("0:3", "ranks 0-1"), ("3:8", "ranks 2-3"))


def test_pending_sums_say_so_in_the_title() -> None:
    assert picture((4,), "b {sum: tp}").title == "[4] 'a {sum: tp}' on dp=2,tp=2"


def test_arrays_have_the_names_of_their_user() -> None:
    assert visualize(vf.device_put(torch.ones(4), "rows/dp", MESH)).title == "[4] 'rows/dp' on dp=2,tp=2"


def test_notebooks_get_one_colour_for_each_holder() -> None:
    html = picture((4, 4), "b/dp d")._repr_html_()
    assert html == (
        "<table><caption>[4, 4] &#x27;a/dp b&#x27; on dp=2,tp=2</caption><tr><th></th><th>0:4</th></tr>"
        '<tr><th>0:2</th><td style="background:#dbe9f6;color:#222">ranks 0-1</td></tr>'
        '<tr><th>2:4</th><td style="background:#fde3cf;color:#222">ranks 2-3</td></tr></table>'
    )


def test_large_meshes_fit() -> None:
    mesh = vf.abstract_mesh(x=64, y=64)
    found = visualize(bind("a/x b/y", (64, 128), mesh.shape))
    assert (len(found.rows), found.rows[63][64]) == (64, "rank 4095")
