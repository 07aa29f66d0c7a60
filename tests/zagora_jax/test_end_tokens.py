import chat_tokenizers as kinds
import pytest

from zagora_jax.data.masks import end_of_turn
from zagora_jax.end_tokens import corrected, taught_ends
from zagora_jax.errors import UserError

# As a base model of Llama 3 that got a chat template: a turn does not end with the tokenizer's EOS.
SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
OTHER_END = kinds.byte_level(kinds.LLAMA3, special=SPECIAL, bos="<|begin_of_text|>", eos="<|end_of_text|>")
EOS, END_OF_TURN = OTHER_END.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"])


def test_an_answer_ends_with_the_templates_token():
    assert end_of_turn(OTHER_END) == END_OF_TURN
    assert taught_ends(OTHER_END) == [EOS, END_OF_TURN]
    chatml = kinds.byte_level()
    assert taught_ends(chatml) == [chatml.eos_token_id]


@pytest.mark.parametrize("template", [None, kinds.ENDLESS, "{{ broken( }}"])
def test_without_a_template_that_serves_the_tokenizers_end_is_left(template):
    tokenizer = kinds.byte_level(template)
    assert end_of_turn(tokenizer) is None
    assert taught_ends(tokenizer) == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (EOS, [EOS, END_OF_TURN]),
        ([EOS, 7], [EOS, 7, END_OF_TURN]),
        ([END_OF_TURN, EOS], None),
        (1, [EOS, END_OF_TURN]),  # another tokenizer's
        (None, [EOS, END_OF_TURN]),
    ],
)
def test_configurations_say_what_training_taught(before, after):
    content = {} if before is None else {"eos_token_id": before}
    assert corrected(content, OTHER_END, "config.json").get("eos_token_id") == after


def test_a_contradictory_bos_is_put_right():
    """As of early Llama conversions: config.json says bos 0 and eos 1, the tokenizer 1 and 2."""
    llama = kinds.llama2()
    assert corrected({"bos_token_id": 0, "eos_token_id": 1}, llama, "config.json") == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert corrected({"bos_token_id": None, "eos_token_id": 2}, llama, "config.json") == {}


def test_ends_that_are_no_tokens_are_named():
    with pytest.raises(UserError, match=r"config\.json: eos_token_id: expected a whole number or a list of them"):
        corrected({"eos_token_id": "2"}, OTHER_END, "config.json")
