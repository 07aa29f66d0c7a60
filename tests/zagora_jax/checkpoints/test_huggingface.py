import json
import logging
import shutil

import ml_dtypes
import numpy as np
import pytest
from checkpoint_builders import CONFIG, llama_tensors, write_folder
from safetensors.numpy import save_file

from zagora_jax.checkpoints.checkpoint import plan_shards
from zagora_jax.checkpoints.huggingface import HuggingFaceCheckpoint, describe_unexpected
from zagora_jax.errors import UserError

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def open_folder(folder):
    return HuggingFaceCheckpoint.open(folder, str(folder))


def edit_index(folder, **changes):
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(content))


@pytest.mark.parametrize(
    "shards", [None, SHARDS, ["embed_tokens.safetensors", "model-00118-model.layers.20.safetensors"]]
)
def test_reads_every_tensor(tmp_path, shards):
    tensors = llama_tensors()
    checkpoint = open_folder(write_folder(tmp_path, tensors, shards))
    assert checkpoint.config == CONFIG
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].shape == tensor.shape
        np.testing.assert_array_equal(checkpoint.read(name), tensor)
        np.testing.assert_array_equal(checkpoint.read_rows(name, 3, 7), tensor[3:7])
    expected = {name: (shards or ["model.safetensors"])[i % len(shards or [1])] for i, name in enumerate(tensors)}
    assert checkpoint.layout == expected
    assert checkpoint.assets["config.json"] == (tmp_path / "config.json").read_bytes()


def test_missing_config(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        open_folder(tmp_path)


def test_missing_shard_is_named_with_what_it_holds(tmp_path):
    write_folder(tmp_path, shards=SHARDS)
    (tmp_path / SHARDS[1]).unlink()
    second = list(llama_tensors())[1]
    with pytest.raises(
        UserError, match=rf"1 files that are not there: {SHARDS[1]}. They hold 10 tensors, first '{second}'"
    ):
        open_folder(tmp_path)


def test_only_the_shards_of_the_index_are_read(tmp_path, caplog):
    stale = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]
    write_folder(tmp_path, {name: np.full_like(t, 1) for name, t in llama_tensors().items()}, stale)
    write_folder(tmp_path, {name: np.full_like(t, 2) for name, t in llama_tensors().items()}, SHARDS)
    checkpoint = open_folder(tmp_path)
    assert all((checkpoint.read(name) == 2).all() for name in checkpoint.tensors)
    assert all(name in caplog.text for name in stale)
    assert not any(name in caplog.text for name in SHARDS)


def test_two_models_in_one_folder_are_refused(tmp_path):
    write_folder(tmp_path, shards=SHARDS)
    write_folder(tmp_path)
    with pytest.raises(UserError, match="two models in one folder"):
        open_folder(tmp_path)


def test_an_index_with_pickled_shards_says_how_to_convert(tmp_path):
    write_folder(tmp_path, shards=SHARDS)
    for shard in SHARDS:
        (tmp_path / shard).unlink()
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        open_folder(tmp_path)
    for part in (INDEX, *SHARDS, "pytorch_model-00001-of-00002.bin", "safe_serialization=True"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds no weights"),
        (["pytorch_model.bin"], "Found pytorch_model.bin. Pickled weights can run code"),
        (["consolidated.00.pth"], "Found consolidated.00.pth"),
        (["model.Q4_K_M.gguf"], "Found model.Q4_K_M.gguf: to use it, name the file itself"),
        (["adapter_model.safetensors"], "PEFT adapter, not a model"),
        (["consolidated.safetensors"], "only consolidated.safetensors"),
        (["a.safetensors", "b.safetensors"], "2 safetensors files .* but no model.safetensors.index.json"),
    ],
)
def test_folders_without_weights_say_what_is_there(tmp_path, files, message):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "a/", "", "x.bin", 3]
)
def test_index_entries_that_leave_the_folder_are_refused(tmp_path, name):
    folder = write_folder(tmp_path / "model", shards=SHARDS)
    shutil.copy(folder / SHARDS[0], tmp_path / "x.safetensors")
    edit_index(folder, **{"model.norm.weight": name})
    with pytest.raises(UserError, match=r"weight_map\['model.norm.weight'\] is"):
        open_folder(folder)


def test_a_linked_subfolder_that_leads_out_is_refused(tmp_path):
    folder = write_folder(tmp_path / "model", shards=SHARDS)
    (tmp_path / "outside").mkdir()
    shutil.copy(folder / SHARDS[0], tmp_path / "outside" / "x.safetensors")
    (folder / "link").symlink_to(tmp_path / "outside")
    edit_index(folder, **{"model.norm.weight": "link/x.safetensors"})
    with pytest.raises(UserError, match="a link leads out of the folder"):
        open_folder(folder)


def test_files_that_are_links_are_read_as_in_the_hub_cache(tmp_path):
    blobs, snapshot = write_folder(tmp_path / "blobs", shards=SHARDS), tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert set(open_folder(snapshot).tensors) == set(llama_tensors())


def test_index_and_shards_must_agree(tmp_path):
    write_folder(tmp_path, shards=SHARDS)
    edit_index(tmp_path, **{"model.more.weight": SHARDS[0]})
    with pytest.raises(UserError, match=rf"{SHARDS[0]} lacks 1 tensors .* first 'model.more.weight'"):
        open_folder(tmp_path)
    write_folder(tmp_path, shards=SHARDS)
    extra = {"extra.weight": np.ones(2, np.float32)}
    own = {n: t for i, (n, t) in enumerate(llama_tensors().items()) if i % 2 == 0}
    save_file(own | extra, tmp_path / SHARDS[0])
    with pytest.raises(UserError, match=r"holds 1 tensors that .* first 'extra.weight' \(not named at all\)"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        "{",
        '{"weight_map": {"a":"x.safetensors","a":"y.safetensors"}}',
    ],
)
def test_a_malformed_index_is_refused(tmp_path, content):
    write_folder(tmp_path, shards=SHARDS)
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(UserError, match=INDEX):
        open_folder(tmp_path)


def test_stored_rotary_tables_are_ignored(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    plain = open_folder(write_folder(tmp_path / "plain"))
    folder = write_folder(tmp_path / "old", llama_tensors() | {name: np.zeros(8, np.float32)})
    checkpoint = open_folder(folder)
    assert name not in checkpoint.tensors
    assert checkpoint.ignored == (name,)
    assert name in caplog.text
    assert checkpoint.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize(
    ("quantization", "named"),
    [({"quant_method": "gptq"}, "'gptq'"), ({"load_in_4bit": True}, "None"), ("fp8", "'fp8'")],
)
def test_quantised_models_are_refused_by_method(tmp_path, quantization, named):
    write_folder(tmp_path, quantization_config=quantization)
    with pytest.raises(UserError, match=f"quant_method is {named}"):
        open_folder(tmp_path)


def test_null_quantization_config_counts_as_absent(tmp_path):
    open_folder(write_folder(tmp_path, quantization_config=None))


def test_fp8_without_scales_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    write_folder(tmp_path)
    save_file({"model.norm.weight": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'model\.norm\.weight' is stored as float8_e4m3fn"):
        open_folder(tmp_path)


def test_code_that_a_config_names_is_ignored_with_a_warning(tmp_path, caplog):
    open_folder(write_folder(tmp_path, auto_map={"AutoModel": "evil.Model"}))
    assert "it is ignored, never run" in caplog.text


def test_fingerprint_tells_models_apart(tmp_path):
    tensors = llama_tensors()
    base = open_folder(write_folder(tmp_path / "a", tensors)).fingerprint()
    assert open_folder(write_folder(tmp_path / "b", tensors)).fingerprint() == base
    assert open_folder(write_folder(tmp_path / "sharded", tensors, SHARDS)).fingerprint() == base
    assert open_folder(write_folder(tmp_path / "c", tensors, rope_theta=5e5)).fingerprint() != base
    tensors["model.norm.weight"][0] += 1
    assert open_folder(write_folder(tmp_path / "d", tensors)).fingerprint() != base


@pytest.mark.parametrize(
    ("name", "explanation"),
    [
        ("base_model.model.model.norm.weight", "unmerged PEFT dump"),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", "unmerged PEFT dump"),
        ("model.layers.0.self_attn.q_proj.SCB", "bitsandbytes"),
        ("model.layers.0.self_attn.q_proj.qweight", "GPTQ"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "fp8"),
        ("_orig_mod.model.norm.weight", "training wrapper"),
        ("layers.0.attention.wq.weight", "Meta's own format"),
    ],
)
def test_unexpected_names_are_explained(name, explanation):
    described = describe_unexpected(["model.norm.weight", name])
    assert explanation in described
    assert name in described


def test_usual_names_need_no_explanation():
    assert describe_unexpected(llama_tensors()) is None


def test_shards_are_planned_as_hugging_face_does():
    assert plan_shards({"a": 3, "b": 2}, 5) == {"a": "model.safetensors", "b": "model.safetensors"}
    assert plan_shards({"a": 9, "b": 2, "c": 3, "d": 1}, 5) == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00002-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
    }


def test_bfloat16_stays_bfloat16(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    write_folder(tmp_path)
    save_file({"model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert open_folder(tmp_path).read("model.norm.weight").dtype == ml_dtypes.bfloat16
