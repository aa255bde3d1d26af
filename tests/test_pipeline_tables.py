"""Pipeline tables as data: text, CSV, costs, timelines and pictures."""

from __future__ import annotations

import io
import struct
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_tables import legal_table, runs_right

from vescale_fn.schedules.pipelines import (
    Action,
    Costs,
    ScheduleError,
    Table,
    check,
    plot,
    schedule,
    simulate,
    with_transfers,
)
from vescale_fn.schedules.pipelines.gantt import as_text, picture


@given(st.randoms(use_true_random=False), st.booleans())
def test_csv_and_back(rng: object, transfers: bool) -> None:
    table = legal_table(rng, 3, 3, 3)  # type: ignore[arg-type]
    table = with_transfers(table) if transfers else table
    assert Table.from_csv(table.to_csv() + "\n", name="table").rows[: table.ranks] == table.rows
    back = Table.from_csv(table.to_csv(), name="table")
    assert back == table
    assert runs_right(back)


def test_csv_files_take_their_name(tmp_path: Path) -> None:
    table = schedule("zbv", 2, 3)
    text = table.to_csv(tmp_path / "mine.csv")
    assert (tmp_path / "mine.csv").read_text() == text
    assert text.startswith("0F0,0F1,0F2,")
    back = Table.from_csv(tmp_path / "mine.csv")
    assert (back.name, back.rows, back.placement) == ("mine", table.rows, table.placement)


def test_csv_of_torch_is_read_with_its_gaps_and_overlapped_pairs() -> None:
    table = Table.from_csv("0F0,0F1,,0B0,0B1\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B,\n")
    assert list(map(str, check(table).rows[1])) == ["1F0", "1B0", "1F1", "1B1"]


def test_tables_are_frozen_and_compare_by_what_they_hold() -> None:
    table = schedule("1f1b", 2, 4)
    assert table == schedule("1f1b", 2, 4) != schedule("1f1b", 2, 5)
    assert hash(table) == hash(schedule("1f1b", 2, 4))
    with pytest.raises(FrozenInstanceError):
        table.microbatches = 5  # type: ignore[misc]


def test_long_rows_are_cut_in_print() -> None:
    lines = str(schedule("interleaved", 16, 512)).splitlines()
    assert lines[0] == "interleaved: 16 ranks, 32 stages, 512 microbatches"
    assert lines[1].startswith("rank 0   0F0 0F1 0F2 ")
    assert lines[1].endswith(" 16F7 ... 2,024 more")
    assert max(map(len, lines)) < 160


REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: Action.parse("3X1"),
        "'3X1' is not an action. Write stage, kind and microbatch, as in 2F7: F is forward, B backward, I and W its "
        "halves (gradient of the input, gradient of the weights), and SEND_F, RECV_F, SEND_B, RECV_B are transfers.",
    ),
    (
        lambda: Table.from_csv("0F0,0F1\n1F0,F1\n", name="plan"),
        "plan, line 2 (rank 1), cell 2: 'F1' is not an action. Write stage, kind and microbatch, as in 2F7: F is "
        "forward, B backward, I and W its halves (gradient of the input, gradient of the weights), and SEND_F, RECV_F, "
        "SEND_B, RECV_B are transfers.",
    ),
    (
        lambda: Table.of([["0F0", "2F0"]]),
        "table: no rank runs a forward of stage 1, though the highest stage is 2. Stages are numbered from 0 without "
        "gaps: add 1F0, 1F1, ...",
    ),
    (
        lambda: Table.of([["0B0"], []]),
        "table has no forward action, so it says nothing of stages. Give each rank a row of actions, as in 0F0.",
    ),
    (
        lambda: Costs.of(3, forward=[1, 2]),
        "forward has 2 entries for 3 stages. Give one per stage, or one number for all.",
    ),
    (
        lambda: Costs.of(2, transfer=[0, -1]),
        "transfer of stage 1 is -1. Costs are times and sizes: 0 or more.",
    ),
    (
        lambda: Costs.of(1, forward=float("nan")),
        "forward of stage 0 is nan. Costs are times and sizes: 0 or more.",
    ),
    (
        lambda: simulate(schedule("1f1b", 2, 2), Costs.of(4)),
        "The costs are of 4 stages, and 1f1b has 2 stages. Pass Costs.of(2, ...).",
    ),
    (
        lambda: simulate(schedule("1f1b", 2, 2)).plot("chart.gif"),
        "'chart.gif' ends in neither .svg nor .png. Use one of them: SVG can be zoomed, PNG is seen everywhere.",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_what_a_refusal_says(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError) as e:
        make()
    assert str(e.value) == text


# ---- time


def test_actions_start_when_their_inputs_arrive() -> None:
    costs = Costs.of(2, forward=[2, 3], backward_input=[1, 4], backward_weight=[2, 5], transfer=[10, 99])
    line = simulate(schedule("1f1b", 2, 2), costs)
    assert line.starts == ((0, 2, 34, 46), (12, 15, 24, 27))
    assert line.ends == ((2, 4, 37, 49), (15, 24, 27, 36))
    assert (line.makespan, line.busy, line.idle, line.period) == (49, (10, 24), (39, 25), 49)
    assert line.bubble == (39 + 25) / (2 * 49)


def test_a_transfer_within_a_rank_takes_no_time() -> None:
    line = simulate(schedule("zbv", 1, 1), Costs.of(2, transfer=100))
    assert line.makespan == 6


@given(st.randoms(use_true_random=False))
def test_no_two_actions_of_a_rank_overlap_and_none_is_early(rng: object) -> None:
    table = legal_table(rng, 4, 3, 4)  # type: ignore[arg-type]
    line = simulate(table, Costs.of(4, forward=[1, 5, 2, 3], backward_input=2.5, transfer=[1, 2, 0, 0]))
    end = {a: e for row, ends in zip(table.rows, line.ends) for a, e in zip(row, ends)}
    for row, starts, ends in zip(table.rows, line.starts, line.ends):
        for i, (a, start) in enumerate(zip(row, starts)):
            ready = [0.0, *ends[i - 1 : i]] if i else [0.0]
            if a.kind == "F" and a.stage:
                ready.append(end[a._replace(stage=a.stage - 1)] + moved(line.costs, table, a.stage - 1))
            if a.kind in "BI":
                after = [end[b] for k in "BI" if (b := Action(k, a.stage + 1, a.microbatch)) in end]
                ready += [e + moved(line.costs, table, a.stage) for e in after] + [end[a._replace(kind="F")]]
            if a.kind == "W":
                ready.append(end[a._replace(kind="I")])
            assert start == max(ready)


def moved(costs: Costs, table: Table, stage: int) -> float:
    return costs.transfer[stage] * (table.placement[stage] != table.placement[stage + 1])


def test_a_table_that_cannot_run_has_no_time() -> None:
    with pytest.raises(ScheduleError, match=r"table: rank 0, 0B0: it stands before 0F0, which it needs"):
        simulate(Table.of([["0B0", "0F0"]]))


def test_transfers_in_a_table_do_not_change_its_time() -> None:
    table = schedule("zb_h1", 3, 5)
    assert simulate(with_transfers(table)).starts == simulate(table).starts


# ---- pictures

NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zbv", "dualpipev", "forward_only")


def test_svg_shows_every_action_of_every_table(tmp_path: Path) -> None:
    lines = [simulate(schedule(name, 2, 4)) for name in NAMES]
    plot(lines, tmp_path / "all.svg")
    root = ET.parse(tmp_path / "all.svg").getroot()
    tips = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == sum(len(list(line.table.actions())) for line in lines)
    assert tips[0] == "0F0: 0 to 1"
    words = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [w for w in words if w and ":" in w] == [str(line) for line in lines]
    assert {"forward", "backward", "backward of the input", "backward of the weights"} <= set(words)


def test_boxes_are_as_long_as_their_actions_and_do_not_overlap() -> None:
    line = simulate(schedule("zbv", 3, 6), Costs.of(6, forward=[1, 2, 3, 4, 5, 6]))
    boxes = {b.tip.split(":")[0]: b for b in picture([line]).boxes if b.tip}
    unit = boxes["0F0"].width
    for row, starts, ends in zip(line.table.rows, line.starts, line.ends):
        for a, start, end in zip(row, starts, ends):
            assert boxes[str(a)].width == pytest.approx((end - start) * unit)
            assert boxes[str(a)].x == pytest.approx(boxes["0F0"].x + start * unit)


def test_png_holds_the_pixels_of_the_drawing(tmp_path: Path) -> None:
    line = simulate(schedule("1f1b", 2, 3))
    line.plot(tmp_path / "chart.png", width=400)
    data = (tmp_path / "chart.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colours, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (width, depth, colours, rest) == (400, 8, 2, [0, 0, 0])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    image = rows[:, 1:].reshape(height, width, 3)
    drawing = picture([line], 400)
    assert (image == drawing.pixels()).all()
    for box in drawing.boxes:  # just inside the left border of a box is its colour
        x, y = round(box.x) + 1, round(box.y) + 1
        covered = any(b.tip and b.x <= x < b.x + b.width and b.y <= y < b.y + b.height for b in drawing.boxes)
        assert "#" + bytes(image[y, x]).hex() == box.colour or (covered and not box.tip)


def test_chart_in_letters() -> None:
    line = simulate(schedule("zb_h1", 2, 3))
    assert as_text(line, 60).splitlines() == [
        "zb_h1: makespan 10, bubble 10.0%, peak activations 2, 2",
        "rank 0  F0 F1 ···I0 W0 F2 I1 W1 I2 W2 ",
        "rank 1  ···F0 I0 F1 I1 W0 F2 I2 W1 W2 ",
    ]
    assert as_text(line, 18).splitlines()[1:] == ["rank 0  FF·IWFIWIW", "rank 1  ·FIFIWFIWW"]
    assert "\x1b[30;48;5;74mF0 \x1b[0m" in as_text(line, 60, colour=True)
    out = io.StringIO()
    line.show(60, file=out)
    assert out.getvalue() == as_text(line, 60) + "\n"


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(8, 20), st.integers(20, 200))
def test_a_chart_in_letters_keeps_its_width(name: str, p: int, m: int, width: int) -> None:
    lines = as_text(simulate(schedule(name, p, m)), width).splitlines()[1:]
    assert len(lines) == p
    assert len(set(map(len, lines))) == 1
    assert len(lines[0]) <= width
