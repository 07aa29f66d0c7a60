"""Tables and norms trained in full, and adapters on the tables, against PEFT: logits, gradients, files and exports."""

import json
import re

import numpy as np
import oracles
import pytest
import safetensors.numpy
from subjects import Subject, assert_gradients_equal, assert_logits_equal

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax.adapter import (
    load_adapter,
    open_adapter,
    peft_config,
    peft_shapes,
    peft_tensors,
    save_adapter,
    with_adapters_options,
)
from zagora_jax.base import open_base
from zagora_jax.checkpoints.peft import read_adapter, write_adapter
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig

pytest.importorskip("torch")

KINDS = {
    "tables and norms in full": {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "norms of layers in full": {"modules_to_save": ["post_attention_layernorm"]},
    "a tied table in full": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "adapters on both tables": {
        "targets": ["q_proj", "embed_tokens", "lm_head"],
        "rank_pattern": ["embed_tokens=3"],
        "alpha_pattern": ["lm_head=5"],
    },
}


# Weights that an export changes, of two layers with an adapter each.
CHANGED = {
    "tables and norms in full": 2 + 2 + 5,
    "norms of layers in full": 2 + 2,
    "a tied table in full": 2 + 1,
    "adapters on both tables": 2 + 2,
}


def lora_of(kind):
    return LoraConfig(**({"rank": 4, "alpha": 8, "targets": ["q_proj"]} | KINDS[kind]))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with a head of its own, and one whose head is the embedding."""
    folder = tmp_path_factory.mktemp("base")
    return {
        tied: oracles.tiny_llama(folder / f"tied {tied}", tie_word_embeddings=tied, tokenizer=not tied)
        for tied in (False, True)
    }


def opened(model, lora, quantization="none"):
    return open_base(str(model), quantization=quantization, dtype="float32", lora=lora)


def written(directory, base, lora):
    """An adapter that does something, as we write it."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in sorted(peft_shapes(base.model).items()):
        if "lora_" in name:
            small = 0.05 if re.search("lora_B|embedding_A", name) else shape[-1] ** -0.5
            tensors[name] = rng.standard_normal(shape, np.float32) * small
        else:
            source = name.removeprefix("base_model.model.")
            tied = base.model.config.tie_embeddings and source == "lm_head.weight"
            original = base.checkpoint.read("model.embed_tokens.weight" if tied else source)
            tensors[name] = (original + rng.standard_normal(shape, np.float32) * 0.05).astype(np.float32)
    if base.model.config.tie_embeddings:
        tensors["base_model.model.lm_head.weight"] = tensors["base_model.model.model.embed_tokens.weight"]
    write_adapter(directory, tensors, peft_config(base.model, lora, "base"), trained=True)
    return directory


def model_of(models, kind):
    return models[kind == "a tied table in full"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_peft(tmp_path, models, kind):
    lora, model = lora_of(kind), model_of(models, kind)
    adapter = written(tmp_path / "adapter", opened(model, lora), lora)
    subject = Subject(model, adapter, lora)
    tokens = np.random.default_rng(0).integers(0, 320, (1, 120))
    assert_logits_equal(subject.logits(tokens), oracles.transformers_logits(model, tokens, adapter=adapter))
    batch = oracles.random_batch(0, (1, 2, 24), packed=True)
    loss, found = subject.gradients(batch)
    if kind == "a tied table in full":  # PEFT names the one table's gradient once
        np.testing.assert_array_equal(
            found.pop("base_model.model.lm_head.weight"), found["base_model.model.model.embed_tokens.weight"]
        )
    theirs = oracles.peft_bnb_gradients(model, adapter, batch, quantization="none")
    assert_gradients_equal((loss, found), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_writes_the_same_names_and_shapes(tmp_path, models, kind):
    """What PEFT writes of such an adapter is read, and what it adds of the base model is passed over."""
    import peft

    lora, model = lora_of(kind), model_of(models, kind)
    base = opened(model, lora)
    theirs = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=lora.targets,
        modules_to_save=lora.modules_to_save,
        rank_pattern=lora.rank_patterns,
        alpha_pattern=lora.alpha_patterns,
        ensure_weight_tying=base.model.config.tie_embeddings,
        task_type="CAUSAL_LM",
    )
    peft.get_peft_model(oracles.load_base(model), theirs).save_pretrained(tmp_path / "theirs")
    tensors, config = read_adapter(tmp_path / "theirs")
    assert {name: tensor.shape for name, tensor in tensors.items()} == peft_shapes(base.model)
    adapters = load_adapter(tmp_path, tensors, config, base.model)
    save_adapter(tmp_path / "ours", base.model, adapters, lora, "base", trained=False)
    again, ours = read_adapter(tmp_path / "ours")
    assert (ours.modules_to_save, ours.ensure_weight_tying) == (
        config.modules_to_save and tuple(lora.modules_to_save),
        config.ensure_weight_tying,
    )
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_training_begins_at_the_base_model(models, kind):
    lora, model = lora_of(kind), model_of(models, kind)
    base = opened(model, lora)
    adapters = initial_adapter(split(base.model)[2], 0, originals=base.originals())
    for name, tensor in peft_tensors(base.model, adapters).items():
        source = name.removeprefix("base_model.model.")
        if source in base.checkpoint.tensors:
            np.testing.assert_array_equal(tensor, base.checkpoint.read(source))
        elif source != "lm_head.weight":
            assert tensor.any() != bool(re.search("lora_B|lora_embedding_A", name)), name


def run_of(tmp_path, model, lora, base):
    from zagora_jax.config import TrainConfig
    from zagora_jax.config_file import save_config

    run = tmp_path / "run"
    run.mkdir()
    config = TrainConfig(model=str(model), data=[run / "rows.jsonl"], lora=lora)
    save_config(config, run / "config.yaml")
    report = {
        "synthetic": False,
        "model_fingerprint": base.fingerprint(),
        "options": config.model_dump(mode="json"),
    }
    (run / "report.json").write_text(json.dumps(report))
    written(run / "adapter", base, lora)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_exports_are_the_tuned_model(tmp_path, models, kind):
    from zagora_jax.commands import ExportConfig
    from zagora_jax.exporter import export

    lora = lora_of(kind)
    model = oracles.tiny_llama(tmp_path / "model", tie_word_embeddings=kind == "a tied table in full")
    run = run_of(tmp_path, model, lora, opened(model, lora))
    result = export(ExportConfig(run=run, to=tmp_path / "out"))
    tokens = np.random.default_rng(1).integers(0, 320, (1, 40))
    theirs = oracles.transformers_logits(model, tokens, adapter=run / "adapter")
    merged = oracles.transformers_logits(tmp_path / "out", tokens)
    assert np.abs(merged - theirs).max() <= 2e-4 * np.abs(theirs).max()
    assert result.merge.adapted == result.merge.changed == CHANGED[kind]
    export(ExportConfig(run=run, to=tmp_path / "alone", format="adapter"))
    alone = oracles.transformers_logits(model, tokens, adapter=tmp_path / "alone")
    np.testing.assert_array_equal(alone, theirs)
    card = (tmp_path / "alone" / "README.md").read_text()
    assert ("vLLM among them, refuse such adapters" in card) == bool(lora.modules_to_save)


def test_an_adapters_modules_to_save_become_the_options(tmp_path, models):
    from zagora_jax.config import TrainConfig

    lora = lora_of("tables and norms in full")
    adapter = written(tmp_path / "adapter", opened(models[False], lora), lora)
    config = TrainConfig(model=str(models[False]), data=["rows.jsonl"], adapter=adapter)
    assert with_adapters_options(config).lora == lora


def test_a_table_that_was_untied_in_training_is_refused_where_it_is_one(tmp_path, models):
    lora = lora_of("a tied table in full")
    base = opened(models[True], lora)
    adapter = written(tmp_path / "adapter", base, lora)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"ensure_weight_tying": False}))
    with pytest.raises(UserError, match="trains the embedding apart from the output head"):
        open_adapter(adapter, base.model)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    weights["base_model.model.lm_head.weight"] = weights["base_model.model.lm_head.weight"] + 1
    safetensors.numpy.save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="differs from the embedding, with which it is one table"):
        open_adapter(adapter, base.model)


@pytest.mark.parametrize(
    ("tied", "options", "message"),
    [
        (False, {"modules_to_save": ["o_proj"]}, "o_proj is a linear module"),
        (False, {"modules_to_save": ["wte"]}, "wte names nothing that can be trained; the model has"),
        (False, {"modules_to_save": ["layers.0.input_layernorm"]}, "but not model.layers.1.input_layernorm: norms are"),
        (False, {"targets": ["lm_head"], "modules_to_save": ["lm_head"]}, "lm_head has an adapter too"),
        (False, {"targets": ["embed_tokens"], "use_dora": True}, "use_dora: not for model.embed_tokens"),
        (True, {"targets": ["embed_tokens"]}, "model.embed_tokens is also the output head"),
        (True, {"targets": ["lm_head"]}, "'lm_head' names no linear module"),
    ],
)
def test_what_cannot_be_trained_is_refused(models, tied, options, message):
    with pytest.raises(UserError, match=message):
        opened(models[tied], LoraConfig(**({"rank": 2, "targets": ["q_proj"]} | options)))


def test_a_run_trains_the_table_saves_it_and_goes_on_the_same(tmp_path):
    import runs

    from zagora_jax.trainer import train
    from zagora_jax.tuned import open_tuned

    model = oracles.tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    rows = runs.write_rows(tmp_path / "rows.jsonl", 8)
    lora = LoraConfig(rank=2, targets=["q_proj"], modules_to_save=["embed_tokens", "input_layernorm"])
    options = {"lora": lora, "max_steps": 2, "save_every": 1, "keep_checkpoints": 3, "learning_rate": 1e-3}
    config = runs.tiny_config(model, tmp_path / "run", rows, eval_data=[rows], **options)
    reporter, printed = runs.recorder()
    result = train(config, reporter)
    assert "in full 4: embed_tokens, input_layernorm, lm_head" in printed()
    weights = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    tensors, _ = read_adapter(weights.parent)
    source = safetensors.numpy.load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"):
        moved = np.abs(tensors[f"base_model.model.{name}"] - source[name])
        assert 0 < moved.max() <= 2.02e-3  # from the base model's, by Adam's steps of the learning rate at most
    assert open_tuned(tmp_path / "run").base.model.config.tie_embeddings
    assert result.loss_after < result.loss_before
    unbroken = weights.read_bytes()
    train(config.model_copy(update={"resume": tmp_path / "run" / "checkpoints" / "1"}), runs.recorder()[0])
    assert weights.read_bytes() == unbroken
