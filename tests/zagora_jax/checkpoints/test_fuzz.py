"""Whatever is wrong with a file, a reader raises UserError and nothing else, at once and without eating memory."""

import json

from checkpoint_builders import CONFIG, llama_tensors, write_folder, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from zagora_jax.checkpoints import AdapterConfig, load_tokenizer, open_checkpoint, read_adapter, write_adapter
from zagora_jax.checkpoints.gguf import GGUFCheckpoint
from zagora_jax.checkpoints.safetensors_file import read_header, read_tensor
from zagora_jax.errors import UserError

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """Overwrite, insert, cut out or cut off some bytes."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(len(changed) - 1, 0)))
        replacement = draw(st.binary(max_size=9))
        removed = draw(st.sampled_from([0, len(replacement), 1, 100]))
        changed[position : position + removed] = replacement
    return bytes(changed)


def accepts_or_refuses(action):
    """Return the action's result, None where it refused; every other exception fails the test."""
    try:
        return action()
    except UserError:
        return None


SAFETENSORS = save(dict(list(llama_tensors().items())[:3]))
HEADER_END = 8 + int.from_bytes(SAFETENSORS[:8], "little")


@QUICK
@given(damaged(SAFETENSORS[:HEADER_END]))
def test_safetensors_headers(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + SAFETENSORS[HEADER_END:])
    for info in (accepts_or_refuses(lambda: read_header(path)) or {}).values():
        assert read_tensor(info).shape == info.shape


@QUICK
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3), st.binary(max_size=40))
def test_safetensors_headers_of_any_content(tmp_path, header, data):
    encoded = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    accepts_or_refuses(lambda: read_header(path))


@QUICK
@given(st.data())
def test_gguf_files(tmp_path, data):
    original = tmp_path / "original.gguf"
    if not original.exists():
        write_gguf(original)
    content = original.read_bytes()
    # The first kilobytes hold metadata and tensor table; the rest are weights, of which every value is good.
    path = tmp_path / "x.gguf"
    path.write_bytes(data.draw(damaged(content[:4000])) + content[4000:])
    checkpoint = accepts_or_refuses(lambda: GGUFCheckpoint.open(path, "x"))
    if checkpoint:
        for name, info in checkpoint.tensors.items():
            assert checkpoint.read(name).shape == info.shape


@QUICK
@given(st.data())
def test_indexes(tmp_path, data):
    folder = tmp_path / "model"
    if not folder.exists():
        write_folder(folder, shards=["a.safetensors", "b.safetensors"])
        (folder / "index").write_bytes((folder / "model.safetensors.index.json").read_bytes())
    index = (folder / "index").read_bytes()
    (folder / "model.safetensors.index.json").write_bytes(data.draw(damaged(index)))
    accepts_or_refuses(lambda: open_checkpoint(str(folder)))


@QUICK
@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*CONFIG, "quantization_config", "auto_map"], JSON)))
def test_configs(tmp_path, changes):
    folder = tmp_path / "model"
    if not folder.exists():
        write_folder(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    accepts_or_refuses(lambda: open_checkpoint(str(folder)))


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}


@settings(QUICK, max_examples=60)
@given(st.data())
def test_tokenizer_files(tmp_path, data):
    folder = tmp_path / "model"
    if not folder.exists():
        write_folder(folder)
    config = {"bos_token": "a", "eos_token": "b", "chat_template": "x"}
    changes = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(config, JSON)))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    content = json.dumps(TOKENIZER).encode()
    (folder / "tokenizer.json").write_bytes(data.draw(damaged(content) | st.just(content)))
    accepts_or_refuses(lambda: load_tokenizer(open_checkpoint(str(folder))))


@QUICK
@given(st.data())
def test_adapters(tmp_path, data):
    import numpy as np

    folder = tmp_path / "adapter"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): np.ones((2, 8), np.float32), name.format("B"): np.ones((4, 2), np.float32)}
    write_adapter(folder, tensors, AdapterConfig(r=2, lora_alpha=4, target_modules=("q_proj",)))
    content = json.loads((folder / "adapter_config.json").read_text())
    changes = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(content, JSON)))
    (folder / "adapter_config.json").write_text(json.dumps(content | changes))
    accepts_or_refuses(lambda: read_adapter(folder))
