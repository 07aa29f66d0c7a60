"""What SECURITY.md promises, where no other test holds it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracles import tiny_llama
from runs import recorder, tiny_config, write_rows

from zagora_jax.checkpoints import open_checkpoint
from zagora_jax.checkpoints.tokenizer import load_tokenizer
from zagora_jax.trainer import train

ROOT = Path(__file__).parent.parent
SOURCES = [path for package in ("zagora_jax", "models", "sharding") for path in (ROOT / package).rglob("*.py")]
TOKEN = "hf_ThisIsNoTokenButMustNotBeFoundAnywhere"


def calls(tree):
    """Names of what is called, and the names of keyword arguments with true constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg for k in node.keywords if getattr(k.value, "value", None) is True}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_loads_pickles_or_runs_code_of_others(path):
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    imported = {alias.name.split(".")[0] for node in imports for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"}
    for name, switched_on in calls(tree):
        assert name not in {"eval", "exec", "compile", "np.load", "numpy.load", "torch.load", "yaml.load", "os.system"}
        assert not switched_on & {"allow_pickle", "trust_remote_code", "shell"}


def test_code_beside_a_model_is_not_run(tmp_path):
    model = tiny_llama(tmp_path / "model")
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\nclass Evil:\n    pass\n"
    for name in ("modeling_evil.py", "tokenization_evil.py", "configuration_evil.py"):
        (model / name).write_text(code)
    for file in ("config.json", "tokenizer_config.json"):
        text = (model / file).read_text().rstrip().removesuffix("}")
        auto_map = '{"AutoModelForCausalLM": "modeling_evil.Evil", "AutoTokenizer": ["tokenization_evil.Evil", null]}'
        (model / file).write_text(f'{text}, "auto_map": {auto_map}, "trust_remote_code": true}}')
    load_tokenizer(open_checkpoint(str(model)))
    assert not ran.exists()


def test_tokens_are_in_no_file_and_no_line_of_a_run(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, TOKEN)
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    reporter, printed = recorder()
    model = tiny_llama(tmp_path / "model")
    train(tiny_config(model, tmp_path / "run", rows, max_steps=1, quantization="none"), reporter)
    assert TOKEN not in printed()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert TOKEN.encode() not in path.read_bytes(), path


def test_a_token_is_not_in_the_message_of_a_hub_that_cannot_be_reached(tmp_path):
    program = "from zagora_jax.checkpoints import open_checkpoint\nopen_checkpoint('owner/model-that-is-not-there')"
    environment = os.environ | {"HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert "owner/model-that-is-not-there: is not a local folder" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_files_are_not_writable_for_everybody(tmp_path):
    """Even where the umask would have them so."""
    program = (
        "import sys\nfrom zagora_jax.command_line import run_command\nfrom zagora_jax.commands import GenerateConfig\n"
        "from zagora_jax.checkpoints.atomic import write_bytes\nfrom pathlib import Path\n"
        f"path = Path({str(tmp_path / 'file')!r})\n"
        "sys.argv = ['generate', 'model', '--prompt', 'Hi']\n"
        "sys.exit(run_command(GenerateConfig, lambda config: write_bytes(path, b'')))\n"
    )
    subprocess.run([sys.executable, "-c", program], umask=0, check=True, timeout=300)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o664
