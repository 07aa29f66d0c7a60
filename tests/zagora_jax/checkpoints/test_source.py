import pytest
from checkpoint_builders import write_folder, write_gguf

from zagora_jax.checkpoints import open_checkpoint
from zagora_jax.errors import UserError


def test_a_folder_and_a_file_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "owner" / "name")  # a local folder comes before the hub
    write_gguf(tmp_path / "x.GGUF")
    folder, file = open_checkpoint("owner/name"), open_checkpoint("x.GGUF")
    assert (folder.name, file.name) == ("owner/name", "x.GGUF")
    assert set(folder.tensors) == set(file.tensors)


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "model")
    assert open_checkpoint("~/model").path == tmp_path / "model"


def test_a_misspelt_path_names_its_neighbours(tmp_path):
    write_folder(tmp_path / "smollm2-instruct")
    with pytest.raises(UserError, match=rf"Did you mean {tmp_path}/smollm2-instruct\?"):
        open_checkpoint(f"{tmp_path}/smollm-instruct")
    write_gguf(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=rf"modle\.gguf does not exist\. Did you mean {tmp_path}/model\.gguf\?"):
        open_checkpoint(f"{tmp_path}/modle.gguf")


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(UserError, match=f"The folder {tmp_path}/absent does not exist either"):
        open_checkpoint(f"{tmp_path}/absent/model")


def test_a_single_word_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="does not have the form OWNER/NAME"):
        open_checkpoint("llama")


def test_a_file_inside_a_model_points_to_its_folder(tmp_path):
    write_folder(tmp_path)
    with pytest.raises(UserError, match=f"name its folder, {tmp_path}"):
        open_checkpoint(f"{tmp_path}/model.safetensors")
    (tmp_path / "x.bin").touch()
    with pytest.raises(UserError, match="is a file, but no GGUF file"):
        open_checkpoint(f"{tmp_path}/x.bin")


def test_a_size_that_never_was_names_those_that_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = (
        "By its name: no llama-3.2 of 70B was released; the nearest are llama-3.2-3b, llama-3.2-1b; 70B are llama-3.3"
    )
    for name in ("meta-llama/Llama-3.2-70B-Instruct", "llama-3.2-70b"):
        with pytest.raises(UserError, match=said):
            open_checkpoint(name)
    for name in ("meta-llama/Llama-3.1-8B", "llama", "someone/own-70b"):
        with pytest.raises(UserError) as error:
            open_checkpoint(name)
        assert "By its name" not in str(error.value)
