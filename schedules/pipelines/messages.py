"""The text of errors: which action of which rank, what is wrong, and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_PLURALS = {"microbatch": "microbatches", "entry": "entries"}


def count(n: int, what: str) -> str:
    """`3 ranks`, `1 rank`."""
    return f"{n:,} {what if n == 1 else _PLURALS.get(what, what + 's')}"


def one_line(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


# ---- texts that are no table


def not_an_action(text: str) -> str:
    return (
        f"'{text}' is not an action. Write stage, kind and microbatch, as in 2F7: F is forward, B backward, "
        "I and W its halves (gradient of the input, gradient of the weights), and SEND_F, RECV_F, SEND_B, RECV_B "
        "are transfers."
    )


def bad_cell(name: str, line: int, column: int, reason: str) -> str:
    return f"{name}, line {line} (rank {line - 1}), cell {column}: {reason}"


def no_forward(name: str) -> str:
    return f"{name} has no forward action, so it says nothing of stages. Give each rank a row of actions, as in 0F0."


def stage_without_forward(name: str, stage: int, stages: int) -> str:
    return (
        f"{name}: no rank runs a forward of stage {stage}, though the highest stage is {stages - 1}. "
        f"Stages are numbered from 0 without gaps: add {stage}F0, {stage}F1, ..."
    )


# ---- costs


def wrong_costs(name: str, got: int, stages: int) -> str:
    return f"{name} has {count(got, 'entry')} for {count(stages, 'stage')}. Give one per stage, or one number for all."


def negative_cost(name: str, stage: int, value: float) -> str:
    return f"{name} of stage {stage} is {value}. Costs are times and sizes: 0 or more."


def costs_of_other_stages(got: int, name: str, stages: int) -> str:
    there = count(stages, "stage")
    return f"The costs are of {count(got, 'stage')}, and {name} has {there}. Pass Costs.of({stages}, ...)."


# ---- schedules by name


def unknown_schedule(name: str, known: Sequence[str]) -> str:
    return f"There is no schedule '{name}'. Known: {one_line(known)}; or make a Table with Table.of or Table.from_csv."


def too_few(what: str, value: int) -> str:
    return f"{what} is {value}. A pipeline has at least one: pass {what}=1 or more."


def fixed_chunks(name: str, wants: int, got: int) -> str:
    return (
        f"schedule '{name}' puts {count(wants, 'stage')} on a rank, and chunks is {got}. "
        f"Leave chunks out, or use 'interleaved' or 'looped_bfs', which take any number."
    )


def needs_microbatches(name: str, least: int, ranks: int, got: int) -> str:
    return (
        f"schedule '{name}' needs at least {count(least, 'microbatch')} on "
        f"{count(ranks, 'rank')}, and there are {got}. Use microbatches={least} or more, or 'zbv', "
        "which has the same stages and takes any number."
    )


def only_for_search(name: str, argument: str) -> str:
    return (
        f"schedule '{name}' does not depend on {argument}: its order is fixed by ranks, microbatches and chunks. "
        f"Leave {argument} out, or use schedule 'auto', which searches with it."
    )


def stages_and_ranks(stages: int, ranks: int, chunks: int | None) -> str:
    wants = f"{count(ranks, 'rank')} with {count(chunks, 'chunk')} each" if chunks else count(ranks, "rank")
    return (
        f"schedule 'auto': the costs are of {count(stages, 'stage')}, which {wants} cannot share evenly. "
        "Give costs of ranks * chunks stages, Costs.of(ranks * chunks, ...)."
    )


def no_room(rank: int, held: float, limit: float) -> str:
    return (
        f"schedule 'auto': rank {rank} holds {held:g} of activations for one microbatch, and its limit is {limit:g}. "
        "Raise memory, or use more microbatches, which are then smaller."
    )


# ---- faults of a table


def outside(what: str, value: int, there: int) -> str:
    return (
        f"there is no {what} {value}: the table has {there}, numbered from 0. "
        "Change the number, or leave the action out."
    )


def wrong_rank(stage: int, home: int) -> str:
    return f"stage {stage} lives on rank {home}. Move the action there."


def no_such_transfer(stage: int, why: str) -> str:
    return f"stage {stage} {why}, so there is nothing to transfer. Leave the action out."


def doubled(first: int, second: int) -> str:
    return f"it stands twice, at places {first} and {second} of the row. Leave one out."


def missing(what: str, where: int) -> str:
    return f"it is missing: {what}. Add it to rank {where}."


def whole_and_half(whole: object, half: object) -> str:
    return f"{whole} is the whole backward, and {half} runs a part of it again. Keep {whole}, or both halves I and W."


def before_its_input(needed: object) -> str:
    return f"it stands before {needed}, which it needs. Move it after {needed}."


def order_of_messages(arrives: object, source: int, twin: object) -> str:
    return (
        f"rank {source} sends {arrives} before {twin}, and messages between two ranks arrive in the order in which "
        f"they are sent. Receive in that order, or move {twin}."
    )


def deadlock(links: Sequence[str]) -> str:
    return f"no rank can go on: {', '.join(links)}. Move one of these actions after what it waits for."


def waits(rank: int, at: object, needed: object, other: int) -> str:
    return f"rank {rank} waits at {at} for {needed} of rank {other}"


def over_limit(held: float, limit: float) -> str:
    return (
        f"it would make the rank hold {held:g} of activations, and the limit is {limit:g}. "
        "Run a backward before it, or raise memory."
    )


def wrong_memory(got: int, ranks: int) -> str:
    return f"memory has {got} limits for {count(ranks, 'rank')}. Give one per rank, or one number for all."


# ---- pictures


def unknown_picture(path: str) -> str:
    return f"'{path}' ends in neither .svg nor .png. Use one of them: SVG can be zoomed, PNG is seen everywhere."
