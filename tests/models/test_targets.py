"""Adapter targets, held to PEFT's own matching."""

import pytest

from models.targets import lora_targets, value_of_module

PROJECTIONS = [
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
]
MODULES = [*(f"model.layers.{layer}.{name}" for layer in range(12) for name in PROJECTIONS), "lm_head"]


@pytest.mark.parametrize(
    "targets",
    [
        r".*self_attn\.(q|v)_proj",
        r".*\.(?:q|k)_proj",
        r"model\.layers\.(1|11)\..*",
        r"lm_head",
        r".*",
        ["q_proj"],
        ["q_proj", "v_proj"],
        ["v_proj", "q_proj", "lm_head"],
        ["self_attn.q_proj"],
        ["1.mlp.up_proj"],
        ["model.layers.11.mlp.down_proj", "k_proj"],
    ],
)
def test_a_list_or_expression_chooses_what_peft_chooses(targets):
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists

    config = peft.LoraConfig(target_modules=targets)
    assert lora_targets(targets, MODULES) == [name for name in MODULES if check_target_module_exists(config, name)]


@pytest.mark.parametrize("tied", [False, True])
def test_all_linear_chooses_what_peft_chooses(tied):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, head_dim=4,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    modules = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert "lm_head" in modules
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    chosen = lora_targets("all-linear", modules)
    assert set(chosen) == set(tuned.targeted_module_names)
    assert chosen == [f"model.layers.{layer}.{name}" for layer in range(2) for name in PROJECTIONS]


def test_all_linear_in_any_case_is_no_expression():
    assert lora_targets("All-Linear", MODULES) == MODULES[:-1]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["qproj"],
            r"'qproj' names no linear module; the nearest is q_proj; the model has q_proj, k_proj, .*, lm_head",
        ),
        (["proj"], r"'proj' names no linear module; .*the model has q_proj, .* \(in full: model\.layers\.0\.self_attn"),
        (["q_proj", "qproj"], r"'qproj' names no linear module"),  # PEFT trains q_proj alone in silence
        (["layers"], r"'layers' names no linear module"),
        ([""], r"'' names no linear module"),
        ([], r"\[\] match no linear module"),
        ("q_proj", r"'q_proj' is a string, so a regular expression for the whole name, .*give a list: \[q_proj\]"),
        (r".*\.qproj", r"matches no whole name of a linear module; the nearest is q_proj"),
        ("(q_proj", r"'\(q_proj' is not a regular expression: "),
    ],
)
def test_targets_that_match_nothing_are_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        lora_targets(targets, MODULES)


def test_expressions_that_would_take_for_ever_are_refused(monkeypatch):
    monkeypatch.setattr("models.targets.MATCHING", 0.1)
    endless = "(?:(?:.|..)+)+[A-Z]"
    with pytest.raises(ValueError, match=r"takes more than 0\.1 s to match .*; write a simpler expression"):
        lora_targets(endless, MODULES)
    with pytest.raises(ValueError, match=r"takes more than 0\.1 s"):
        value_of_module({endless: 3}, "model.layers.10.self_attn.q_proj", 1)


def test_the_model_of_nothing():
    with pytest.raises(ValueError, match="the model has none"):
        lora_targets("all-linear", [])
