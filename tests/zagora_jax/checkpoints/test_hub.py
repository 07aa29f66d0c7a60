import json
import os
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from checkpoint_builders import llama_tensors, write_folder
from huggingface_hub.errors import LocalEntryNotFoundError

from zagora_jax.checkpoints import hub, open_checkpoint
from zagora_jax.errors import UserError

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """A hub that holds one model and many files besides, and a record of what was fetched from it."""
    remote = write_folder(tmp_path / "remote", shards=SHARDS)
    for name in ("pytorch_model.bin", "modeling_evil.py", "consolidated.safetensors", "tokenizer.json", "README.md"):
        (remote / name).write_text("{}")
    (remote / "additional_chat_templates").mkdir()
    (remote / "additional_chat_templates" / "tool.jinja").write_text("x")
    fetched = set()

    def snapshot_download(repo_id, allow_patterns):
        assert repo_id == "owner/name"
        snapshot = tmp_path / "cache" / "snapshots" / "abc"
        for file in remote.rglob("*"):
            name = file.relative_to(remote).as_posix()
            if file.is_file() and any(fnmatch(name, pattern) for pattern in allow_patterns):
                fetched.add(name)
                (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                if not (snapshot / name).exists():
                    (snapshot / name).symlink_to(file)
        return str(snapshot)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot_download)
    return remote, fetched


def test_only_what_is_needed_is_fetched(fake_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("owner/name")
    assert checkpoint.name == "owner/name"
    assert set(checkpoint.tensors) == set(llama_tensors())
    index = "model.safetensors.index.json"
    assert fake_hub[1] == {"config.json", index, "tokenizer.json", "additional_chat_templates/tool.jinja", *SHARDS}


def test_an_index_that_leaves_the_folder_fetches_no_weights(fake_hub):
    remote, fetched = fake_hub
    (remote / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(UserError, match="expected the name of a file inside the folder"):
        open_checkpoint("owner/name")
    assert not any(name.endswith(".safetensors") for name in fetched)


def test_a_hub_out_of_reach_is_one_clear_error(tmp_path):
    # A real call to an address where nobody listens, in a process of its own: the library reads these settings once.
    settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    program = "from zagora_jax.checkpoints.hub import download; download('owner/name')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "zagora_jax.errors.UserError: owner/name: is not a local folder or GGUF file, and the hub cannot be reached"
    )


def test_offline_mode_is_one_clear_error(monkeypatch):
    def fail(*args, **kwargs):
        raise LocalEntryNotFoundError("outgoing traffic has been disabled")

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"the hub cannot be reached .*outgoing traffic has been disabled"):
        open_checkpoint("owner/name")


@pytest.mark.parametrize("name", ["owner/name", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b.c_d"])
def test_hub_ids(name):
    assert hub.is_hub_id(name)


@pytest.mark.parametrize("name", ["name", "../name", "./name", "/a/b", "a/b/c", "~/b", "a/", "", "a b/c"])
def test_what_is_no_hub_id(name):
    assert not hub.is_hub_id(name)
