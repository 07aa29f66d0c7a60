"""Rows that are larger than memory would hold: what a process takes does not grow with its data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
import chat_tokenizers
from zagora_jax.data.batches import Batches
from zagora_jax.data.tokenize import Preparation, tokenize_rows

def anonymous():  # memory that is not the page cache's, in KiB
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

peak, reading = 0, True
def watch():
    global peak
    while reading:
        peak = max(peak, anonymous())
        time.sleep(0.02)

tokenizer = chat_tokenizers.byte_level()
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
data = tokenize_rows([sys.argv[1]], tokenizer, Preparation(1024))
batches = Batches(data.examples, sequence_length=1024, packing=True, micro_batch_size=4)
batches.fingerprint, batches.at(batches.steps_per_epoch() // 2)
reading = False
watcher.join()
print(len(data.examples.tokens) * 8, (peak - before) * 1024)
"""


def measure(path: Path, rows: int) -> tuple[int, int]:
    """Bytes of the tokenised rows, and bytes of memory that making them took."""
    with path.open("w") as file:
        for number in range(rows):
            file.write(
                json.dumps({"text": f"{number} " + "The river Arda rises in the Rhodope mountains. " * 40}) + "\n"
            )
    tests = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.insert(0, {tests!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    tokens, memory = done.stdout.split()
    return int(tokens), int(memory)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path):
    small_tokens, small = measure(tmp_path / "small.jsonl", 2_000)
    large_tokens, large = measure(tmp_path / "large.jsonl", 20_000)
    grown = large_tokens - small_tokens
    assert grown > 50 * 2**20
    # What grows is 24 bytes a row, its order in an epoch, and what allocators have not given back.
    assert large - small < 0.4 * grown
