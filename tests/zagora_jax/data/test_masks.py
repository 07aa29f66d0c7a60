import chat_tokenizers as kinds
import numpy as np
import pytest

from zagora_jax.data.chat import render
from zagora_jax.data.masks import Encoder
from zagora_jax.data.rows import Completion, Conversation, PlainText, TokenRow
from zagora_jax.data.sources import Location
from zagora_jax.data.turns import Turn
from zagora_jax.errors import UserError

HERE = Location("train.jsonl", 7)
TURNS = (
    Turn("user", "What is the capital?"),
    Turn("assistant", "Sofia, é 😀."),
    Turn("user", "Hi"),
    Turn("assistant", "  Hello\n"),
)


def encode(form, tokenizer, sequence_length=512):
    [(tokens, weights)] = Encoder(tokenizer, sequence_length).encode([render(form, tokenizer, HERE)], [HERE])
    assert tokens.dtype == np.int32
    assert weights.dtype == np.float32
    assert set(weights.tolist()) <= {0, 1}
    return tokens, weights > 0


def runs(tokenizer, tokens, supervised) -> list[str]:
    """The texts of neighbouring supervised tokens."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], supervised.astype(int), [0]])))
    return [tokenizer.decode(tokens[begin:end]) for begin, end in borders.reshape(-1, 2)]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("template", [kinds.CHATML, kinds.CHATML_MARKED, kinds.CHATML_MARKED_SHORT])
def test_answers_and_their_end_tokens_are_supervised(template, trim_offsets):
    tokenizer = kinds.byte_level(template, trim_offsets=trim_offsets)
    tokens, supervised = encode(Conversation(TURNS), tokenizer)
    reference = tokenizer.apply_chat_template([turn.message() for turn in TURNS])["input_ids"]
    assert tokens.tolist() == reference
    assert runs(tokenizer, tokens, supervised) == ["Sofia, é 😀.<|im_end|>", "  Hello\n<|im_end|>"]


def test_mask_equals_that_of_transformers_where_the_template_has_marks():
    tokenizer = kinds.byte_level(kinds.CHATML_MARKED)
    _, supervised = encode(Conversation(TURNS), tokenizer)
    reference = tokenizer.apply_chat_template(
        [turn.message() for turn in TURNS], return_assistant_tokens_mask=True, return_dict=True
    )
    assert sum(reference["assistant_masks"]) > 0
    assert supervised.astype(int).tolist() == reference["assistant_masks"]
    _, derived = encode(Conversation(TURNS), kinds.byte_level(kinds.CHATML))
    assert derived.tolist() == supervised.tolist()


def test_llama_3_has_one_bos_though_template_and_tokenizer_write_one():
    tokenizer = kinds.llama3()
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello"))
    tokens, supervised = encode(Conversation(turns), tokenizer)
    assert tokens.tolist() == tokenizer.apply_chat_template([turn.message() for turn in turns])["input_ids"]
    assert (tokens == tokenizer.bos_token_id).sum() == 1
    assert runs(tokenizer, tokens, supervised) == ["Hello<|eot_id|>"]


def test_llama_2_spaces_around_the_answer_are_the_answers():
    tokenizer = kinds.llama2()
    tokens, supervised = encode(Conversation((Turn("user", "Hi"), Turn("assistant", "Sofia é"))), tokenizer)
    reference = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sofia é"}]
    )
    assert tokens.tolist() == reference["input_ids"]
    assert [run.strip() for run in runs(tokenizer, tokens, supervised)] == ["Sofia é </s>"]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])["input_ids"]
    assert not supervised[: len(prompt)].any()
    assert supervised[len(prompt) :].all()


@pytest.mark.parametrize("make", [kinds.llama3, kinds.llama2])
def test_text_has_one_bos_and_one_eos(make):
    tokenizer = make()
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    for text in ("Hello there", f"{bos}Hello there", f"Hello there{eos}"):
        tokens, supervised = encode(PlainText(text), tokenizer)
        assert tokens[0] == tokenizer.bos_token_id
        assert (tokens == tokenizer.bos_token_id).sum() == 1
        assert tokens[-1] == tokenizer.eos_token_id
        assert (tokens == tokenizer.eos_token_id).sum() == 1
        assert not supervised[0]
        assert supervised[1:].all()


def test_text_of_a_tokenizer_without_bos():
    tokenizer = kinds.byte_level()
    tokens, supervised = encode(PlainText("Hello there"), tokenizer)
    assert tokens.tolist() == [*tokenizer("Hello there")["input_ids"], tokenizer.eos_token_id]
    assert supervised.tolist() == [False] + [True] * (len(tokens) - 1)


def test_one_answer_token_gives_two_supervised_targets():
    tokenizer = kinds.byte_level(None)
    tokens, supervised = encode(Completion("12345", "6"), tokenizer)
    assert tokens.tolist() == [*tokenizer("123456")["input_ids"], tokenizer.eos_token_id]
    assert supervised.tolist() == [False] * 5 + [True, True]


def test_empty_text_has_no_tokens():
    tokens, supervised = encode(PlainText(""), kinds.llama3())
    assert len(tokens) == len(supervised) == 0


def test_template_without_end_tokens_is_refused():
    with pytest.raises(UserError, match="line 7: the chat template of tiny-byte-level writes no end token"):
        encode(Conversation(TURNS), kinds.byte_level(kinds.ENDLESS))


def test_tokenizer_without_eos_is_refused():
    tokenizer = kinds.byte_level()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="tiny-byte-level: the tokenizer has no end-of-sequence token"):
        Encoder(tokenizer, 16)


def test_very_long_rows_are_encoded_as_far_as_they_can_be_used():
    tokenizer = kinds.byte_level()
    turns = (Turn("user", "Hi"), Turn("assistant", "word " * 200_000))
    tokens, supervised = encode(Conversation(turns), tokenizer, sequence_length=64)
    whole = tokenizer.apply_chat_template([turn.message() for turn in turns])["input_ids"]
    assert 64 <= len(tokens) < 20_000
    assert tokens[:64].tolist() == whole[:64]
    prompt = tokenizer.apply_chat_template([turns[0].message()], add_generation_prompt=True)["input_ids"]
    assert np.flatnonzero(supervised)[0] == len(prompt)
    assert supervised[len(prompt) :].all()


def test_smollm2_whose_pad_is_its_eos(smollm2):
    from zagora_jax.checkpoints import load_tokenizer, open_checkpoint

    tokenizer = load_tokenizer(open_checkpoint(str(smollm2)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    tokens, supervised = encode(Conversation(TURNS), tokenizer)
    assert tokens.tolist() == tokenizer.apply_chat_template([turn.message() for turn in TURNS])["input_ids"]
    # Header and second answer meet in the token "\n ", which a prompt cannot end with: it is left to the header.
    assert runs(tokenizer, tokens, supervised) == ["Sofia, é 😀.<|im_end|>", " Hello\n<|im_end|>"]


def test_weights_cover_the_answer_and_its_end_token():
    tokenizer = kinds.byte_level()
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello", 0.25), Turn("user", "Hi"), Turn("assistant", "Bye", 2.0))
    [(tokens, weights)] = Encoder(tokenizer, 512).encode([render(Conversation(turns), tokenizer, HERE)], [HERE])
    assert runs(tokenizer, tokens, weights == 0.25) == ["Hello<|im_end|>"]
    assert runs(tokenizer, tokens, weights == 2) == ["Bye<|im_end|>"]
    assert set(weights.tolist()) == {0, 0.25, 2}
    tokenizer.chat_template = None
    for form in (PlainText("abc", 0.5), Completion("a", "bc", 0.5)):
        [(tokens, weights)] = Encoder(tokenizer, 512).encode([render(form, tokenizer, HERE)], [HERE])
        assert weights[-1] == 0.5  # the end token's
        assert tokens[-1] == tokenizer.eos_token_id


def test_rows_of_tokens_are_taken_as_they_are():
    tokenizer = kinds.byte_level()
    row = TokenRow(np.array([5, 6, 7], np.int32), np.array([1, 0.5, 0], np.float32))
    text = render(PlainText("abc"), tokenizer, HERE)
    encoder = Encoder(tokenizer, 512)
    (first, (tokens, weights), last) = encoder.encode([text, row, text], [HERE] * 3)
    assert tokens.tolist() == [5, 6, 7]
    assert weights.tolist() == [0, 0.5, 0]  # nothing stands before the first
    assert first[0].tolist() == last[0].tolist()
    for wrong in (-1, len(tokenizer)):
        row = TokenRow(np.array([5, wrong], np.int32), np.ones(2, np.float32))
        with pytest.raises(
            UserError, match=rf"line 7, field input_ids\[1\]: expected a token of .*, 0 to \d+, found {wrong}"
        ):
            encoder.encode([row], [HERE])
