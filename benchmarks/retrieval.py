"""Tunes an embedder on medical terms and their definitions, and says how often a term finds its own, before and after.

    python benchmarks/retrieval.py --model FOLDER --output RUN

The pairs are the names and exact synonyms of the terms of the Human Phenotype Ontology (see definitions.py) with the
terms' definitions. Terms, not pairs, are drawn to be held out, so that no definition is both learned and asked for.
Each held-out query looks for its definition among all held-out ones.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from definitions import ontology

from zagora_jax import EmbeddingTrainer

HELD_OUT_TERMS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the base model")
    parser.add_argument("--output", type=Path, required=True, help="the run directory")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--pairs-at-a-time", type=int, default=16, help="per_device_train_batch_size")
    parser.add_argument("--pairs", type=int, default=32, help="of an optimizer step, over all devices")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32, help="of a text at most")
    parser.add_argument("--pooling", choices=("last", "mean"), default="last")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--remat", default="none")
    parser.add_argument("--export", type=Path, help="write a folder for sentence-transformers")
    given = parser.parse_args()
    training, held_out = split(pairs(ontology()))
    print(f"{len(training)} pairs to train on, {len(held_out)} held out", flush=True)
    trainer = EmbeddingTrainer(
        given.model,
        gpu_ids=range(given.devices),
        gradient_accumulation_steps=given.pairs // given.pairs_at_a_time // given.devices,
        pooling=given.pooling,
        output=str(given.output),
        sequence_length=given.tokens,
        compute_dtype=given.dtype,
        remat=given.remat,
        log_every=1,
    )
    trainer.train(
        training,
        eval_dataset=held_out,
        max_steps=given.steps,
        per_device_train_batch_size=given.pairs_at_a_time,
        learning_rate=given.learning_rate,
        warmup_ratio=0.1,
        save_steps=20,
    )
    report = json.loads((given.output / "report.json").read_text())
    for name, moment in (("further_before", "before"), ("further_after", "after")):
        print(moment, {key: round(value, 4) for key, value in report[name].items()})
    if given.export is not None:
        trainer.export(given.export)


def pairs(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every term that has a definition: the definition, and what the term is called."""
    for term in text.split("\n[Term]\n")[1:]:
        name = re.search(r"^name: (.*)$", term, re.MULTILINE)
        definition = re.search(r'^def: "((?:[^"\\]|\\.)*)"', term, re.MULTILINE)
        if name and definition:
            synonyms = re.findall(r'^synonym: "((?:[^"\\]|\\.)*)" EXACT', term, re.MULTILINE)
            yield unescaped(definition[1]), [name[1], *map(unescaped, synonyms)]


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def split(terms: Iterator[tuple[str, list[str]]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The rows to train on, and those of the terms that are held out."""
    shuffled = sorted(terms)
    random.Random(0).shuffle(shuffled)
    parts = (shuffled[HELD_OUT_TERMS:], shuffled[:HELD_OUT_TERMS])
    learned = {definition for definition, _ in parts[0]}
    training = [{"query": name, "positive": definition} for definition, names in parts[0] for name in names]
    held_out = [
        {"query": name, "positive": definition}
        for definition, names in parts[1]
        if definition not in learned
        for name in names
    ]
    return training, held_out


if __name__ == "__main__":
    main()
