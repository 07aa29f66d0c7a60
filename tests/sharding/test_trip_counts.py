from __future__ import annotations

import pytest

from sharding.hlo import parse

# As XLA leaves a loop that it has pipelined and unrolled: what counts is noted, but not how far.
TEXT = """HloModule jit_f, num_partitions=4

%below (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %bound = s32[] constant(7)
  ROOT %compared = pred[] compare(%a, %bound), direction=LT
}

%one_more (c: s32[]) -> s32[] {
  %c = s32[] parameter(0)
  %one = s32[] constant(STEP)
  ROOT %sum = s32[] add(%c, %one)
}

%condition (s: (f32[4], s32[])) -> pred[] {
  %s = (f32[4]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=1
  ROOT %goes_on = pred[] fusion(%i), kind=kLoop, calls=%below
}

%body (t: (f32[4], s32[])) -> (f32[4], s32[]) {
  %t = (f32[4]{0}, s32[]) parameter(0)
  %x = f32[4]{0} get-tuple-element(%t), index=0
  %y = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  %j = s32[] get-tuple-element(%t), index=1
  %k = s32[] copy(%j)
  ROOT %next = (f32[4]{0}, s32[]) tuple(%y, %counted)
  %counted = s32[] fusion(%k), kind=kLoop, calls=%one_more
}

ENTRY %main (x.1: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  %zero = s32[] FIRST
  %zero.1 = s32[] copy(%zero)
  %state = (f32[4]{0}, s32[]) tuple(%x.1, %zero.1)
  %loop = (f32[4]{0}, s32[]) while(%state), condition=%condition, body=%body COUNTER
  ROOT %result = f32[4]{0} get-tuple-element(%loop), index=0
}
"""


COUNTER = ', backend_config={"known_induction_variable":{"tuple_index":"1"}}'


def trips(text: str) -> int | None:
    (found,) = [
        visit.trips
        for visit in parse(text.replace(" COUNTER", COUNTER)).walk()
        if visit.instruction.opcode == "all-reduce"
    ]
    return found


@pytest.mark.parametrize(
    ("first", "step", "count"),
    [
        ("constant(0)", "1", 7),
        ("constant(1)", "1", 6),
        ("constant(0)", "2", 4),
        ("constant(-7)", "7", 2),
        ("constant(9)", "1", 0),
    ],
)
def test_a_counter_is_followed(first: str, step: str, count: int) -> None:
    assert trips(TEXT.replace("FIRST", first).replace("STEP", step)) == count


@pytest.mark.parametrize(
    "unknown",
    [
        TEXT.replace("FIRST", 'custom-call(), custom_call_target="now"').replace("STEP", "1"),
        TEXT.replace("FIRST", "constant(0)").replace("STEP", "0"),  # never ends
        TEXT.replace("FIRST", "constant(0)").replace("STEP", "1").replace(" COUNTER", ""),
        TEXT.replace("FIRST", "constant(0)").replace("STEP", "1").replace("copy(%j)", "negate(%j)"),
    ],
)
def test_what_cannot_be_followed_is_not_guessed(unknown: str) -> None:
    assert trips(unknown) is None
