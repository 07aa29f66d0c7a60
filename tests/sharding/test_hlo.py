from __future__ import annotations

import pytest

from sharding.hlo import Array, parse, replica_groups


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="ENTRY computation"):
        parse("module @jit_f { }")


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['data'=2,'fsdp'=4] {'data'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['data'=2,'fsdp'=4] {'data','fsdp'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh[data=2,fsdp=4] {fsdp}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['data'=2,'fsdp'=4] {'fsdp':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['data'=2,'fsdp'=4] {'fsdp':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", [[0, 3], [1, 2]]),
    ],
)
def test_notations_of_groups(notation: str, groups: list[list[int]]) -> None:
    attributes = f"channel_id=1, replica_groups={notation}, dimensions={{0}}, use_global_device_ids=true"
    assert sorted(map(list, replica_groups(attributes, 8))) == groups


def test_an_unknown_notation_of_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the replica groups"):
        replica_groups("channel_id=1, replica_groups=<all>", 8)


def test_pairs_form_groups() -> None:
    attributes = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{4,5},{5,4},{6,6}}, metadata={}"
    assert replica_groups(attributes, 8) == ((0, 1, 2, 3), (4, 5), (6,))


@pytest.mark.parametrize(
    ("dtype", "size"), [("pred", 3), ("u8", 3), ("s4", 2), ("bf16", 6), ("f8e4m3fn", 3), ("c64", 24), ("token", 0)]
)
def test_sizes_of_types(dtype: str, size: int) -> None:
    assert Array(dtype, (3,)).bytes == size
