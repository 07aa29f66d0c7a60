import io
import json
import subprocess
import sys

import pytest
import sentencepiece
from checkpoint_builders import write_folder
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from zagora_jax.checkpoints import check_tokenizer, load_tokenizer, open_checkpoint
from zagora_jax.errors import UserError

CHAT = [{"role": "user", "content": ""}]
TEXT = " Hello  world</s>x"


def word_level(folder, words=("<s>", "</s>", "a", "b"), **config):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))


def load(folder):
    return load_tokenizer(open_checkpoint(str(folder)))


@pytest.fixture(scope="module")
def sentencepiece_model():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello world, hello  there"] * 30),
        model_writer=model,
        vocab_size=290,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def large_folder(folder):
    """A model whose embedding has rows for every piece of the SentencePiece model."""
    import numpy as np

    return write_folder(folder, {"model.embed_tokens.weight": np.zeros((512, 4), np.float32)})


def test_sentencepiece_alone_gives_the_ids_of_its_tokenizer_json(tmp_path, sentencepiece_model):
    folder = large_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    alone = load(folder)
    # The same tokenizer as transformers' converter for Llama writes it, put together by hand.
    pieces = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    vocabulary = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    by_score = sorted(
        (i for i in range(3, len(vocabulary)) if not pieces.is_byte(i)), key=lambda i: -pieces.get_score(i)
    )
    merges = [
        (piece[:cut], piece[cut:])
        for piece in map(pieces.id_to_piece, by_score)
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    by_hand = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    by_hand.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    by_hand.decoder = decoders.Fuse()
    by_hand.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    by_hand.add_special_tokens(["<unk>", "<s>", "</s>"])
    by_hand.save(str(folder / "tokenizer.json"))
    both = load(folder)
    assert alone(TEXT).input_ids == both(TEXT).input_ids
    assert alone(TEXT).input_ids == [1, *pieces.encode(" Hello  world"), 2, *pieces.encode("x")]
    assert (alone.bos_token_id, alone.eos_token_id, alone.unk_token_id) == (1, 2, 0)


def test_sentencepiece_without_legacy_behaviour(tmp_path, sentencepiece_model):
    folder = large_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    (folder / "tokenizer_config.json").write_text(json.dumps({"legacy": False, "add_bos_token": False}))
    pieces = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    # transformers' Metaspace adds no space before a text that begins with one; the text after </s> gets none either.
    assert load(folder)(TEXT).input_ids == [*pieces.encode("Hello  world"), 2, *pieces.encode("x")[1:]]


WORDS = ["some words and more words", "Schöne Grüße aus Zürich", "fine ½ ﬁne Ｆｕｌｌ width", "a  b\tc", "今日は 世界"]
TEXTS = [
    "some more words",
    "  leading, inner   and trailing spaces  ",
    "Grüße, ﬁne ½ and Ｆｕｌｌ\twidth\nlines",
    "unknown: 🙂🙃 ∮ Ж",
    "今日は世界",
    "<0x41> is text",
    " ",
    "",
]


def trained(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 30),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        character_coverage=1.0,
        **options,
    )
    return model.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
        {"model_type": "unigram", "normalization_rule_name": "nfkc_cf", "remove_extra_whitespaces": False},
        {"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False},
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_every_kind_gives_the_ids_of_sentencepiece(tmp_path, options):
    model = trained(**options)
    folder = large_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(model)
    ours, theirs = load(folder), sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours(text, add_special_tokens=False).input_ids == ids, text
        if options.get("byte_fallback"):
            assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "word", "normalization_rule_name": "identity"}, "another kind than BPE or unigram"),
        ({"model_type": "unigram", "treat_whitespace_as_suffix": True}, "writes spaces otherwise"),
    ],
)
def test_other_sentencepiece_models_are_refused(tmp_path, options, message):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words and more words"] * 30),
        model_writer=model,
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    folder = write_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    with pytest.raises(UserError, match=message):
        load(folder)


def test_a_tiktoken_file_of_the_same_name_is_refused(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\nIw== 2\n")
    with pytest.raises(UserError, match="is no SentencePiece model"):
        load(folder)


def test_no_tokenizer_lists_the_names_looked_for(tmp_path):
    with pytest.raises(UserError, match=r"looked for tokenizer\.json and tokenizer\.model"):
        load(write_folder(tmp_path))


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_one_clear_error(tmp_path, content):
    folder = write_folder(tmp_path)
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}: the tokenizer cannot be loaded"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 5}, "tokenizer_config.json: chat_template: expected a text or a list of named templates"),
        ({"model_max_length": "long"}, "the tokenizer cannot be loaded: "),
    ],
)
def test_fields_of_another_type_are_one_clear_error(tmp_path, config, message):
    folder = write_folder(tmp_path)
    word_level(folder, **config)
    with pytest.raises(UserError, match=f"{tmp_path}: {message}"):
        load(folder)


def test_tokens_without_a_row_are_refused_by_file(tmp_path):
    folder = write_folder(tmp_path)
    word_level(folder, ("<s>", "</s>", *map(str, range(126))))
    assert len(load(folder)) == 128  # as many tokens as rows
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 128, "<newer>": 129}))
    with pytest.raises(
        UserError, match=r"added_tokens\.json: token id 129 >= embedding rows 128 \(2 tokens lie beyond"
    ):
        load(folder)


def test_fewer_tokens_than_rows_are_usual(tmp_path):
    folder = write_folder(tmp_path)
    word_level(folder)
    check_tokenizer(load(folder), 4)
    with pytest.raises(UserError, match="token id 3 >= embedding rows 3"):
        check_tokenizer(load(folder), 3)


def test_config_that_contradicts_the_tokenizer_is_reported(tmp_path, caplog):
    folder = write_folder(tmp_path, bos_token_id=0, eos_token_id=[2, 3])
    word_level(folder)
    tokenizer = load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    (record,) = caplog.records
    assert "config.json says eos_token_id [2, 3], the tokenizer (tokenizer_config.json) says 1" in record.message


def test_one_of_several_ends_is_no_contradiction(tmp_path, caplog):
    folder = write_folder(tmp_path, bos_token_id=0, eos_token_id=[3, 1])
    word_level(folder)
    load(folder)
    assert not caplog.records


def test_special_tokens_that_the_files_leave_out_come_from_the_config(tmp_path, caplog):
    folder = write_folder(tmp_path, bos_token_id=0, eos_token_id=[1, 3])
    word_level(folder)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert "config.json's '</s>' is used" in caplog.text


def test_code_that_a_tokenizer_names_is_not_run(tmp_path):
    folder = write_folder(tmp_path, bos_token_id=0, eos_token_id=1)
    word_level(folder, tokenizer_class="EvilTokenizer", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    assert load(folder)("b").input_ids == [3]


def test_chat_templates_are_found_in_every_place(tmp_path):
    folder = write_folder(tmp_path)
    word_level(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'processor' }}"}))
    assert load(folder).apply_chat_template(CHAT, tokenize=False) == "processor"
    word_level(folder, chat_template="{{ 'config' }}")
    assert load(folder).apply_chat_template(CHAT, tokenize=False) == "config"
    (folder / "chat_template.jinja").write_text("{{ 'file' }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ 'tool' }}")
    tokenizer = load(folder)
    assert tokenizer.apply_chat_template(CHAT, chat_template="default", tokenize=False) == "file"
    assert tokenizer.apply_chat_template(CHAT, chat_template="tool", tokenize=False) == "tool"


def test_torch_is_not_needed(tmp_path):
    folder = write_folder(tmp_path)
    word_level(folder, chat_template="{{ messages[0].content }}")
    program = """
import sys
sys.modules["torch"] = None  # an attempt to import it fails
from zagora_jax.checkpoints import load_tokenizer, open_checkpoint
tokenizer = load_tokenizer(open_checkpoint(sys.argv[1]))
print(tokenizer("b").input_ids, tokenizer.apply_chat_template([{"role": "user", "content": "b"}], tokenize=False))
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    assert done.stdout == "[3] b\n"


def test_pieces_that_are_no_text_are_refused(tmp_path, sentencepiece_model):
    folder = write_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model.replace("▁there".encode(), b"\xff" * 8))
    with pytest.raises(UserError, match=r"tokenizer\.model is damaged: .* some that are no text"):
        load(folder)
