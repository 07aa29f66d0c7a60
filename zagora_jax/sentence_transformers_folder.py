"""Embedders as folders that sentence-transformers loads: a Hugging Face model, and how its hidden states are pooled."""

import json
from pathlib import Path
from typing import Any

from zagora_jax.checkpoints.atomic import write_bytes
from zagora_jax.checkpoints.json_files import read_json_object
from zagora_jax.config import ExportConfig, TrainConfig
from zagora_jax.exporter import export
from zagora_jax.options import Given, build
from zagora_jax.reporting.progress import Reporter

_MODULE = "sentence_transformers.models"


def export_embedder(config: TrainConfig, to: Path, reporter: Reporter, *, base: str, overwrite: bool) -> Path:
    """Merge the adapter of a run into its base model, and add what sentence-transformers needs to know.

    Raises:
        UserError: see `zagora_jax.exporter.export`.
    """
    given = {"run": config.output, "to": to, "base": base, "overwrite": overwrite}
    options = build(ExportConfig, {name: Given(value, f"export: {name}") for name, value in given.items()})
    folder = export(options, reporter).directory
    size = read_json_object(folder / "config.json")["hidden_size"]
    for name, content in files(config, size).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    return folder


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
