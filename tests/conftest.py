"""Settings that every test runs under, and the real model for those that need one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
_LONGEST = "resume hanging every_strategy distribution trainer tensor_parallel real_tune pipeline contracts streaming"
LONGEST = [f"test_{name}.py" for name in _LONGEST.split()]
MOST_MEMORY = 3 * 2**30  # bytes of a process of tests, before it forgets compiled programs

_CACHES = tempfile.TemporaryDirectory(prefix="caches-")


def _settle_environment() -> None:
    """One real CPU device, no cache but one of its own, no network; before jax is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # `make test-gpu` sets cuda.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", "")).strip()
    if flags:
        os.environ["XLA_FLAGS"] = flags
    else:
        os.environ.pop("XLA_FLAGS", None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # What commands cache is gone when the tests end.
    os.environ["XDG_CACHE_HOME"] = _CACHES.name


_settle_environment()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the files, begin with those that take longest, so that all end together."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs eight devices before any fixture of it is made."""
    if item.get_closest_marker("eight_devices") and item.name != "test_on_eight_devices":
        import eight_devices

        if not eight_devices.available():
            pytest.skip("run by test_on_eight_devices")


@pytest.fixture(scope="module", autouse=True)
def _few_compiled_programs() -> Iterator[None]:
    """Forget what earlier modules have compiled, which later ones hardly use, once it takes much memory."""
    yield
    if psutil.Process().memory_info().rss > MOST_MEMORY:
        import jax

        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def _saves_in_time() -> Iterator[None]:
    """Tiny steps are over before the disk is: so that each run saves the same steps, training waits for it."""
    from runs import saves_in_time

    with pytest.MonkeyPatch.context() as patch:
        saves_in_time(patch.setattr)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched into .cache on first use."""
    command = [sys.executable, str(REPOSITORY / "examples" / "fetch_smollm2.py")]
    fetched = subprocess.run(command, capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.fail(f"{command} ended with {fetched.returncode}:\n{fetched.stdout}{fetched.stderr}", pytrace=False)
    return Path(fetched.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def smollm2_directory(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a Hugging Face directory (bfloat16, no tokenizer), made by transformers' own GGUF reader."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.bfloat16)
    model.hf_quantizer = None  # The weights are dequantised, yet save_pretrained refuses a model that came out of GGUF.
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(directory)
    return directory
