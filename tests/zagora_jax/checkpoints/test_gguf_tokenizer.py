import io
import json

import pytest
import sentencepiece
from checkpoint_builders import TINY_TOKENS, tiny_gguf_tokenizer, write_gguf
from sentencepiece import sentencepiece_model_pb2

from zagora_jax.checkpoints import load_tokenizer
from zagora_jax.checkpoints.gguf import GGUFCheckpoint
from zagora_jax.errors import UserError

CHAT = [{"role": "user", "content": ""}]


def open_gguf(path):
    return GGUFCheckpoint.open(path, str(path))


def edited(edit):
    def write(writer):
        tiny_gguf_tokenizer(writer)
        edit(writer)

    return write


def replaced(key, value, kind="string"):
    """Write the tiny tokenizer with another value for the entry `key`."""

    def write(writer):
        tiny_gguf_tokenizer(writer)
        del writer.kv_data[0][f"tokenizer.ggml.{key}"]
        if value is not None:
            getattr(writer, f"add_{kind}")(f"tokenizer.ggml.{key}", value)

    return write


def test_byte_level_tokenizer(tmp_path):
    tokenizer = load_tokenizer(open_gguf(write_gguf(tmp_path / "x.gguf")))
    assert tokenizer("the</s>hxe").input_ids == [TINY_TOKENS.index(token) for token in ("the", "</s>", "h", "x", "e")]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", None)


def test_bos_is_added_where_the_metadata_says_so(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", tokenizer=edited(lambda writer: writer.add_add_bos_token(True)))
    assert load_tokenizer(open_gguf(path))("the").input_ids == [1, TINY_TOKENS.index("the")]


def test_llama3_adds_bos_by_default(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", tokenizer=replaced("pre", "llama-bpe"))
    assert load_tokenizer(open_gguf(path))("the").input_ids[0] == 1


def test_chat_templates(tmp_path):
    one = write_gguf(tmp_path / "1.gguf", tokenizer=edited(lambda writer: writer.add_chat_template("{{ 'one' }}")))
    assert load_tokenizer(open_gguf(one)).apply_chat_template(CHAT, tokenize=False) == "one"
    templates = [{"name": "default", "template": "{{ 'one' }}"}, {"name": "tool", "template": "{{ 'two' }}"}]
    two = write_gguf(tmp_path / "2.gguf", tokenizer=edited(lambda writer: writer.add_chat_template(templates)))
    assert load_tokenizer(open_gguf(two)).apply_chat_template(CHAT, chat_template="tool", tokenize=False) == "two"


def test_every_token_that_ends_a_turn_ends_generation(tmp_path):
    def edit(writer):
        writer.add_eot_token_id(5)
        writer.add_pad_token_id(0)

    checkpoint = open_gguf(write_gguf(tmp_path / "x.gguf", tokenizer=edited(edit)))
    generation = json.loads(checkpoint.assets["generation_config.json"])
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0}


def test_an_unnamed_pre_tokenizer_is_llama_cpps_default_with_a_warning(tmp_path, caplog):
    open_gguf(write_gguf(tmp_path / "x.gguf", tokenizer=replaced("pre", None)))
    assert "does not say how its tokenizer splits text" in caplog.text


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (replaced("pre", "viking"), "tokenizer.ggml.pre 'viking' is not supported"),
        (replaced("model", "bert"), "tokenizer.ggml.model 'bert' is not supported"),
        (replaced("model", "llama"), "no metadata entry tokenizer.ggml.scores"),
        (replaced("merges", ["t  h"], "array"), "merge 't  h' does not join"),
        (replaced("merges", ["th"], "array"), "merge 'th' does not join"),
        (replaced("merges", ["t x"], "array"), "merge 't x' does not join"),
        (replaced("eos_token_id", None), "no metadata entry tokenizer.ggml.eos_token_id"),
        (replaced("eos_token_id", 4096, "uint32"), "eos_token_id is 4096, but there are 100 tokens"),
        (replaced("token_type", [1, 2], "array"), "100 tokenizer.ggml.tokens have 2 types"),
        (replaced("tokens", ["a"] * 100, "array"), "the token 'a' has two ids, 0 and 1"),
        (replaced("tokens", [1] * 100, "array"), "tokenizer.ggml.tokens must hold values of type str"),
        (replaced("tokens", None), "no metadata entry tokenizer.ggml.tokens"),
    ],
)
def test_tokenizers_that_would_give_other_ids_are_refused(tmp_path, tokenizer, message):
    assert len(TINY_TOKENS) == 100
    with pytest.raises(UserError, match=message):
        open_gguf(write_gguf(tmp_path / "x.gguf", tokenizer=tokenizer))


def test_sentencepiece_tokenizer(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat and the hat and that"] * 50),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    pieces = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue()).pieces

    def write(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([piece.piece for piece in pieces])
        writer.add_token_scores([piece.score for piece in pieces])
        writer.add_token_types([piece.type for piece in pieces])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    # The embedding has fewer rows than this vocabulary, which the tokenizer's own check would refuse.
    checkpoint = open_gguf(write_gguf(tmp_path / "x.gguf", tokenizer=write))
    with pytest.raises(UserError, match=r"token id \d+ >= embedding rows 128"):
        load_tokenizer(checkpoint)
    checkpoint.tensors = {}
    tokenizer = load_tokenizer(checkpoint)
    original = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in ("the cat  and é\n", "that"):
        assert tokenizer(text).input_ids == [1, *original.encode(text)]
    assert tokenizer.unk_token == "<unk>"
