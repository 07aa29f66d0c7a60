import pytest

from zagora_jax.data.sources import Location
from zagora_jax.data.turns import Turn, read_tools, read_turn
from zagora_jax.errors import UserError

HERE = Location("train.jsonl", 7)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Sofia"}}}


def turn(entry: dict) -> Turn:
    return read_turn(entry, HERE, "messages[0]")


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {**CALL, "function": {"name": "weather", "arguments": '{"city": "Sofia"}'}},  # as OpenAI writes it
        {"id": "c1", "name": "weather", "arguments": {"city": "Sofia"}},
    ],
)
def test_calls_of_tools_reach_the_template_in_one_form(call):
    for content in ({}, {"content": None}, {"content": ""}):
        assert turn({"role": "assistant", "tool_calls": [call], **content}) == Turn(
            "assistant", "", extra={"tool_calls": [CALL]}
        )


def test_an_argument_that_is_null_stays_null():
    call = {"function": {"name": "f", "arguments": {"unit": None}}}
    assert turn({"role": "assistant", "tool_calls": [call]}).extra["tool_calls"][0]["function"]["arguments"] == {
        "unit": None
    }


def test_results_of_tools():
    entry = {"role": "tool", "content": "21", "name": "weather", "tool_call_id": "c1"}
    assert turn(entry).message() == entry
    assert turn({"from": "observation", "value": "21"}) == Turn("tool", "21")


def test_an_empty_text_counts_as_absent():
    entry = {"role": "assistant", "content": "a"}
    assert turn(entry | {"reasoning_content": "", "name": ""}) == turn(entry)


# What JSON does not have, inside a string that holds JSON: a row's own parser never sees it.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r'{"x": "a\ud83d"}', r"\.x: expected Unicode text, found \\ud83d, half of a surrogate pair"),
        (r'{"a\ud83d": 1}', "half of a surrogate pair"),
        ('{"x": NaN}', r"\.x: expected text, found the number nan"),
        ('{"x": 1, "x": 2}', "the text in it: expected each key once, found 'x' twice in one object"),
        ('{"x": %s}' % ("[" * 100_000 + "]" * 100_000), "the text in it is nested too deeply"),
        ('{"x": %s}' % ("9" * 5000), "the text in it: Exceeds the limit"),
    ],
)
def test_json_in_a_string_is_as_strict_as_a_row(text, message):
    with pytest.raises(UserError, match=rf"^train\.jsonl, line 7, field .*{message}"):
        turn({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]})
    with pytest.raises(UserError, match=rf"^train\.jsonl, line 7, field .*{message}"):
        read_tools(f"[{text}]", HERE)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"role": "user", "content": "a", "tool_calls": [CALL]},
            "tool_calls: expected in a turn of assistant, found in",
        ),
        (
            {"role": "user", "content": "a", "tool_call_id": "1"},
            "tool_call_id: expected in a turn of tool, found in user",
        ),
        ({"role": "assistant", "tool_calls": CALL}, "tool_calls: expected a list of calls, found an object"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"tool_calls\[0\]: expected \{function: .*, found a string"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\]: expected \{function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"tool_calls\[0\]\.function\.arguments: the text in it is not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "function.arguments: expected an object, found a list",
        ),
        ({"role": "assistant", "content": "a", "name": 3}, "name: expected a string, found the number 3"),
        ({"role": "assistant", "content": None}, "content: expected a string, found null"),
        ({"role": "assistant", "content": "a", "audio": {}}, "found role, content, audio"),
    ],
)
def test_wrong_turns_are_refused_by_field(entry, message):
    with pytest.raises(UserError, match=rf"^train\.jsonl, line 7, field messages\[0\].*{message}"):
        turn(entry)


def test_tools_are_objects_or_their_json_text():
    tool = {"type": "function", "function": {"name": "weather"}}
    assert read_tools([tool], HERE) == (tool,)
    assert read_tools('[{"type": "function", "function": {"name": "weather"}}]', HERE) == (tool,)
    assert read_tools(None, HERE) == read_tools("", HERE) == read_tools([], HERE) == ()
    for wrong, message in (
        ({}, "expected a list of functions, found an object"),
        (["f"], r"tools\[0\]: expected an obj"),
    ):
        with pytest.raises(UserError, match=message):
            read_tools(wrong, HERE)
