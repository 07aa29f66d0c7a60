"""What sentence-transformers needs beside a Hugging Face model to load it: how hidden states are pooled."""

import json
from pathlib import Path
from typing import Any

from zagora_jax.checkpoints.json_files import read_json_object
from zagora_jax.config import TrainConfig

_MODULE = "sentence_transformers.models"


def write_modules(directory: Path, config: TrainConfig) -> None:
    """Write it beside the model in `directory`, which nobody reads yet."""
    size = read_json_object(directory / "config.json")["hidden_size"]
    for name, content in files(config, size).items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def files(config: TrainConfig, size: int) -> dict[str, Any]:
    """Return the contents of the files beside the model's, for vectors of `size` numbers."""
    options = config.retrieval
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"{_MODULE}.{kind}"}
            for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ],
        "sentence_bert_config.json": {"max_seq_length": config.sequence_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": size,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": options.pooling == "mean",
            "pooling_mode_lasttoken": options.pooling == "last",
            "include_prompt": True,
        },
        "2_Normalize/config.json": {},
        "config_sentence_transformers.json": {
            "prompts": {"query": options.query_prefix, "document": options.passage_prefix},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
