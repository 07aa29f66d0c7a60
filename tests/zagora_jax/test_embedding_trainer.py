"""An embedder from its rows to a folder that sentence-transformers reads."""

import json
import shutil

import numpy as np
import pytest
from oracles import tiny_llama
from runs import compiled_once, numbers, recorder, write_pairs

from zagora_jax import EmbeddingTrainer
from zagora_jax.config import TrainConfig
from zagora_jax.data.pairs import held_out_pairs, read_pairs, training_pairs
from zagora_jax.embedding_model import hardest
from zagora_jax.errors import UserError
from zagora_jax.run_directory import RunDirectory

ARGUMENTS = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "save_steps": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedders")
    tiny_llama(folder / "model")
    write_pairs(folder / "pairs.jsonl", 24)
    with compiled_once(folder / "programs"):
        yield folder


def trainer_into(folder, output, **options):
    given = {"compute_dtype": "float32", "quantized_cache": "off", "sequence_length": 64, "lora": {"rank": 4}}
    return EmbeddingTrainer(
        folder / "model",
        gpu_ids=[0],
        gradient_accumulation_steps=3,
        output=str(output),
        query_prefix="q: ",
        reporter=recorder()[0],
        **given | options,
    )


@pytest.fixture(scope="module")
def trained(folder):
    trainer = trainer_into(folder, folder / "run")
    before = trainer.evaluate(folder / "pairs.jsonl")
    trainer.train(folder / "pairs.jsonl", eval_dataset=folder / "pairs.jsonl", **ARGUMENTS)
    return trainer, before


def test_recall_rises_and_is_reported(folder, trained):
    trainer, before = trained
    report = json.loads((folder / "run/report.json").read_text())
    assert report["further_before"] == pytest.approx(before)
    assert report["further_after"]["mrr"] > 2 * before["mrr"]
    assert report["further_after"] == pytest.approx(trainer.evaluate())
    assert report["loss_after"] < report["loss_before"]


def test_a_resumed_run_is_the_unbroken_one(folder, trained, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")
    again = trainer_into(folder, tmp_path / "run")
    checkpoint = str(tmp_path / "run/checkpoints/3")
    again.train(
        folder / "pairs.jsonl", eval_dataset=folder / "pairs.jsonl", resume_from_checkpoint=checkpoint, **ARGUMENTS
    )
    assert numbers(tmp_path / "run") == numbers(folder / "run")
    weights = "adapter/adapter_model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (folder / "run" / weights).read_bytes()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_sentence_transformers_gives_the_same_vectors(folder, trained, tmp_path, pooling):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    trainer, _ = trained
    if pooling == "mean":
        shutil.copytree(folder / "run", tmp_path / "run")
        config = (tmp_path / "run/config.yaml").read_text()
        (tmp_path / "run/config.yaml").write_text(config.replace("pooling: last", "pooling: mean"))
        trainer = trainer_into(folder, tmp_path / "run", pooling="mean")
    exported = trainer.export(tmp_path / "exported")
    theirs = sentence_transformers.SentenceTransformer(str(exported), device="cpu")
    texts = ["It is 7. ", "What is 3?", "a much longer text " * 20]  # the last is cut
    # Float32 on both sides, in another order of sums: see `subjects`.
    np.testing.assert_allclose(theirs.encode(texts), trainer.embed(texts), atol=2e-4)
    np.testing.assert_allclose(theirs.encode_query(texts), trainer.embed(texts, query=True), atol=2e-4)
    assert np.abs(theirs.encode_query(texts) - theirs.encode(texts)).max() > 0.01


def test_without_quantisation_the_original_weights_are_exported(folder, monkeypatch):
    """There are no others then."""
    given = []
    monkeypatch.setattr(EmbeddingTrainer, "_export", lambda *_, **options: given.append(options["base"]))
    for quantization in ("none", "nf4"):
        config = TrainConfig(model="m", data=["d"], quantization=quantization, retrieval={"pooling": "last"})
        monkeypatch.setattr(RunDirectory, "read_config", lambda _, config=config: config)
        trainer_into(folder, folder / "run").export("to")
    assert given == ["original", "dequantized"]


def test_mined_negatives_are_wrong_and_near(folder, trained):
    trainer, _ = trained
    pairs = list(read_pairs([str(folder / "pairs.jsonl")]))
    rows = trainer.mine(folder / "pairs.jsonl", 3, corpus=["something else"], ceiling=2.0)
    passages = [*dict.fromkeys(text for pair in pairs for text in (pair.positive, *pair.negatives)), "something else"]
    vectors, queries = trainer.embed(passages), trainer.embed([pair.query for pair in pairs], query=True)
    for pair, row, query in zip(pairs, rows, queries, strict=True):
        assert (row["query"], row["positive"]) == (pair.query, pair.positive)
        scores = {text: score for text, score in zip(passages, vectors @ query, strict=True) if text != pair.positive}
        assert row["negatives"] == sorted(scores, key=lambda text: -scores[text])[:3]
    with pytest.raises(UserError, match="expected 1 to 47, the passages that are wrong for a query, found 48"):
        trainer.mine(folder / "pairs.jsonl", 48)


def test_what_scores_almost_as_the_right_passage_is_left_alone():
    scores = np.array([0.9, 0.8, 0.7, 0.1, 0.6, 0.76])
    assert hardest(scores, [0], 0.75, 2).tolist() == [2, 4]
    assert hardest(scores, [0], 0.75, 4).tolist() == [2, 4, 3, 5]  # for want of others


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "a"}, "line 1: expected the keys query and positive, and perhaps negatives, found query"),
        ({"query": "a", "positive": "b", "answer": "c"}, "found query, positive, answer"),
        ({"query": " ", "positive": "b"}, "line 1, field query: expected a text, found nothing but space"),
        ({"query": "a", "positive": 3}, "line 1, field positive: expected a string, found the number 3"),
        (
            {"query": "a", "positive": "b", "negatives": "c"},
            "field negatives: expected a list of texts, found a string",
        ),
    ],
)
def test_wrong_rows_are_refused(tmp_path, row, message):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message):
        list(read_pairs([str(tmp_path / "pairs.jsonl")]))


def test_rows_without_enough_negatives_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"line 1, field negatives: retrieval.hard_negatives is 2, found 1"):
        trainer_into(folder, tmp_path / "run").train(folder / "pairs.jsonl", **{"retrieval.hard_negatives": 2})


def test_held_out_pairs_must_be_given(folder):
    config = TrainConfig(model="m", data=[str(folder / "pairs.jsonl")], retrieval={"pooling": "last"})
    with pytest.raises(UserError, match="no pairs are held out"):
        held_out_pairs(config)


def test_a_passage_is_on_one_side_alone(folder):
    config = TrainConfig(
        model="m", data=[str(folder / "pairs.jsonl")], eval_fraction=0.3, retrieval={"pooling": "last"}
    )
    training, held_out = training_pairs(config), held_out_pairs(config)
    assert len(training) + len(held_out) == 24
    assert {pair.positive for pair in training}.isdisjoint({pair.positive for pair in held_out})
    assert held_out


@pytest.mark.parametrize(
    "given", [{"partition_strategy": "layerwise"}, {"partition_strategy": "streaming"}, {"packing": True}]
)
def test_what_embedders_cannot_do_is_refused(folder, given):
    with pytest.raises(UserError, match=r"retrieval.pooling last does not go with"):
        EmbeddingTrainer(folder / "model", **given)
