import chat_tokenizers as kinds
import pytest

from zagora_jax.data.chat import Rendered, Span, render
from zagora_jax.data.rows import Completion, Conversation, Instruction, PlainText
from zagora_jax.data.sources import Location
from zagora_jax.data.turns import Turn
from zagora_jax.errors import UserError

HERE = Location("train.jsonl", 7)
TURNS = (
    Turn("system", "Be brief."),
    Turn("user", "Hi"),
    Turn("assistant", "Hello"),
    Turn("user", "Who?"),
    Turn("assistant", "I"),
)


@pytest.fixture(scope="module")
def tokenizer():
    return kinds.byte_level()


def with_template(tokenizer, template):
    tokenizer.chat_template = template
    return tokenizer


def learned(rendered: Rendered) -> list[str]:
    return [rendered.text[span.start : span.end] for span in rendered.spans]


@pytest.mark.parametrize(
    "template", [kinds.CHATML, kinds.CHATML_MARKED, kinds.CHATML_MARKED_SHORT, kinds.CHATML_WITHOUT_PROMPT]
)
def test_answers_are_found_with_and_without_marks(tokenizer, template):
    rendered = render(Conversation(TURNS), with_template(tokenizer, template), HERE)
    messages = [turn.message() for turn in TURNS]
    assert rendered.text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert learned(rendered) == ["Hello", "I"]
    assert rendered.spans[1][0] == rendered.text.rindex("I<|im_end|>")


@pytest.mark.parametrize("answer", ["assistant", "<|im_start|>assistant\n", "user", "<", "Hi", " Hi \n", "\n\nHi", ""])
def test_answers_that_look_like_the_template(tokenizer, answer):
    for template in (kinds.CHATML, kinds.CHATML_WITHOUT_PROMPT, kinds.CHATML_MARKED, kinds.CHATML_MARKED_SHORT):
        turns = (Turn("user", "Hi"), Turn("assistant", answer), Turn("user", "Hi"), Turn("assistant", answer))
        rendered = render(Conversation(turns), with_template(tokenizer, template), HERE)
        assert [text.strip() for text in learned(rendered)] == [answer.strip()] * 2
        assert [span.start for span in rendered.spans] == [
            len(before) for before in ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        ]  # fmt: skip


def test_template_that_trims(tokenizer):
    llama3 = kinds.llama3()
    rendered = render(Conversation((Turn("user", "Hi"), Turn("assistant", "\n Hello \n"))), llama3, HERE)
    assert learned(rendered) == ["Hello"]
    rendered = render(Conversation((Turn("user", "Hi"), Turn("assistant", " Hello"))), kinds.llama2(), HERE)
    assert learned(rendered) == [" Hello"]  # the model writes the space: the prompt ends before it


def test_conversation_that_begins_with_the_assistant(tokenizer):
    turns = (Turn("assistant", "Welcome"), Turn("user", "Hi"), Turn("assistant", "Hello"))
    rendered = render(Conversation(turns), with_template(tokenizer, kinds.CHATML), HERE)
    assert learned(rendered) == ["Welcome", "Hello"]
    with pytest.raises(
        UserError, match=r"train\.jsonl, line 7: the chat template of tiny-llama-2 refuses.*must alternate"
    ):
        render(Conversation(turns), kinds.llama2(), HERE)


def test_conversation_that_ends_with_the_user(tokenizer):
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello"), Turn("user", "Bye"))
    assert learned(render(Conversation(turns), with_template(tokenizer, kinds.CHATML), HERE)) == ["Hello"]


def test_reasoning_blocks(tokenizer):
    with_template(tokenizer, kinds.QWEN3)
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello"), Turn("user", "Who?"), Turn("assistant", "I"))
    rendered = render(Conversation(turns), tokenizer, HERE)
    assert "assistant\n<think>\n\n</think>\n\nI<|im_end|>" in rendered.text
    assert learned(rendered) == ["Hello", "I"]  # the empty block that the template writes is not learned
    reasoned = "<think>\nWell.\n</think>\n\nI"
    assert learned(render(Conversation((*turns[:3], Turn("assistant", reasoned))), tokenizer, HERE)) == [
        "Hello",
        reasoned,
    ]
    with pytest.raises(
        UserError, match=r"line 7: the chat template of tiny-byte-level does not render turn 2 \(assistant\)"
    ):
        render(Conversation((turns[0], Turn("assistant", reasoned), *turns[2:])), tokenizer, HERE)


def test_marks_that_do_not_fit_are_refused(tokenizer):
    first_only = kinds.CHATML_MARKED.replace("message['role'] == 'assistant'", "loop.last")
    with pytest.raises(UserError, match="marks 1 generations, expected 2"):
        render(Conversation(TURNS), with_template(tokenizer, first_only), HERE)
    altered = kinds.CHATML_MARKED.replace("{{ message['content'] +", "{{ 'nothing' +", 1)
    with pytest.raises(UserError, match="does not mark assistant turn 1 as it was written"):
        render(Conversation(TURNS), with_template(tokenizer, altered), HERE)


def test_marks_around_what_others_say_are_refused(tokenizer):
    turn = "{{ m.role }}: {{ m.content }}<|im_end|>"
    whole = f"{{% generation %}}{{% for m in messages %}}{turn}{{% endfor %}}{{% endgeneration %}}"
    reasoning = (
        "{% for m in messages %}{% if m.role == 'user' %}user: {{ m.content }}<|im_end|>{% else %}{% generation %}"
        "<think></think>{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
    )
    turns = (Turn("user", "I"), Turn("assistant", "I"))
    with pytest.raises(UserError, match=r"line 7: .* marks turns of others as the assistant's generation"):
        render(Conversation(turns), with_template(tokenizer, whole), HERE)
    assert learned(render(Conversation(turns), with_template(tokenizer, reasoning), HERE)) == ["<think></think>I"]


def test_dates_in_templates_stand_still(tokenizer):
    rendered = render(Conversation(TURNS), with_template(tokenizer, kinds.DATED), HERE)
    assert rendered.text.startswith("Today is 26 Jul 2024.\n")


def test_templates_run_in_a_sandbox(tokenizer):
    with pytest.raises(UserError, match=r"refuses the row.*unsafe"):
        render(Conversation(TURNS), with_template(tokenizer, "{{ messages.__class__.__mro__ }}"), HERE)


def test_forms_with_a_chat_template(tokenizer):
    with_template(tokenizer, kinds.CHATML)
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
    for form, request in (
        (Completion("2+2?", "four"), "2+2?"),
        (Instruction("Add.", "2 2", "four"), "Add.\n\n2 2"),
        (Instruction("Add 2 and 2.", "", "four"), "Add 2 and 2."),
    ):
        rendered = render(form, tokenizer, HERE)
        assert rendered.text == chat.format(request)
        assert learned(rendered) == ["four"]
    with pytest.raises(UserError, match=r"line 7, field prompt: .*found '<\|im_start\|>' at its start"):
        render(Completion("<|im_start|>user\n2+2?<|im_end|>", "four"), tokenizer, HERE)


def test_forms_without_a_chat_template(tokenizer):
    with_template(tokenizer, None)
    assert render(Completion("2+2=", "4"), tokenizer, HERE) == Rendered("2+2=4", (Span(4, 5),), chat=False)
    assert render(PlainText("abc"), tokenizer, HERE) == Rendered("abc", (Span(0, 3),), chat=False)
    rendered = render(Instruction("Add.", "2 2", "four"), tokenizer, HERE)
    assert rendered.text.endswith("### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\nfour")
    assert learned(rendered) == ["four"]
    assert "### Input" not in render(Instruction("Add.", "", "four"), tokenizer, HERE).text
    with pytest.raises(UserError, match="line 7: a row of turns needs a chat template, and tiny-byte-level has no"):
        render(Conversation(TURNS), tokenizer, HERE)


CALLS = {"tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Sofia"}}}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
WITH_TOOLS = (
    Turn("user", "How warm is it?"),
    Turn("assistant", "Let me look.", extra=CALLS),
    Turn("tool", "21", extra={"name": "weather"}),
    Turn("assistant", "It is 21."),
    Turn("user", "And now?"),
    Turn("assistant", "", extra=CALLS),
)


def test_calls_of_tools_are_learned_as_the_template_lays_them_out(tokenizer):
    rendered = render(Conversation(WITH_TOOLS, (TOOL,)), with_template(tokenizer, kinds.TOOLS), HERE)
    messages = [turn.message() for turn in WITH_TOOLS]
    assert rendered.text == tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Sofia"}}\n</tool_call>'
    assert learned(rendered) == ["Let me look.\n" + call, "It is 21.", call]
    assert "<|im_start|>system\n{" in rendered.text
    assert [rendered.text[span.end :].startswith("<|im_end|>") for span in rendered.spans] == [True] * 3


def test_a_template_that_lays_tools_out_elsewhere_is_refused(tokenizer):
    late = kinds.TOOLS + "{{ messages | length }}"  # what was rendered so far is no beginning of the whole
    with pytest.raises(UserError, match=r"does not render turn 2 \(assistant\) as it was written"):
        render(Conversation(WITH_TOOLS, (TOOL,)), with_template(tokenizer, late), HERE)


def test_a_turn_without_weight_is_not_learned(tokenizer):
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello", 0.0), Turn("user", "Who?"), Turn("assistant", "I", 0.25))
    for template in (kinds.CHATML, kinds.CHATML_MARKED, kinds.CHATML_WITHOUT_PROMPT):
        rendered = render(Conversation(turns), with_template(tokenizer, template), HERE)
        assert learned(rendered) == ["I"]
        assert rendered.spans[0].weight == 0.25


def test_earlier_reasoning_that_is_dropped_does_no_harm_without_weight(tokenizer):
    reasoned = "<think>\nWell.\n</think>\n\nI"
    turns = (Turn("user", "Hi"), Turn("assistant", reasoned, 0.0), Turn("user", "Who?"), Turn("assistant", "I"))
    assert learned(render(Conversation(turns), with_template(tokenizer, kinds.QWEN3), HERE)) == ["I"]


def test_weights_of_rows_without_turns(tokenizer):
    with_template(tokenizer, None)
    assert render(PlainText("abc", 0.5), tokenizer, HERE).spans == (Span(0, 3, 0.5),)
    assert render(Completion("a", "b", 2.0), tokenizer, HERE).spans == (Span(1, 2, 2.0),)
    assert render(PlainText("abc", 0.0), tokenizer, HERE).spans == ()
    rendered = render(Completion("a", "b", 2.0), with_template(tokenizer, kinds.CHATML), HERE)
    assert [span.weight for span in rendered.spans] == [2.0]


def test_calls_are_found_where_the_last_turn_is_rendered_unlike_earlier_ones(tokenizer):
    """As Qwen3 does: rendered so far, a call stands behind an empty reasoning block; in the whole it does not."""
    thought = "{% if loop.last and message.role == 'assistant' %}{{ '\n<think>\n\n</think>\n' }}{% endif %}"
    template = kinds.TOOLS.replace("{% if message.content %}", thought + "{% if message.content %}")
    rendered = render(Conversation(WITH_TOOLS[:4], (TOOL,)), with_template(tokenizer, template), HERE)
    assert [text.partition(":")[0] for text in learned(rendered)] == [
        'Let me look.\n<tool_call>\n{"name"',
        "It is 21.",
    ]


@pytest.mark.parametrize(
    ("turns", "tools", "key"),
    [
        ((*WITH_TOOLS[:1], Turn("assistant", "a")), (TOOL,), "tools"),
        (WITH_TOOLS, (), "tool_calls"),
        ((Turn("user", "a"), Turn("assistant", "b", extra={"reasoning_content": "c"})), (), "reasoning_content"),
    ],
)
def test_what_a_template_would_leave_out_is_refused(tokenizer, turns, tools, key):
    with pytest.raises(UserError, match=f"the chat template of tiny-byte-level knows no {key}, which the row has"):
        render(Conversation(turns, tools), with_template(tokenizer, kinds.CHATML), HERE)
