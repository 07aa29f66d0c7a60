"""Tunes a generator on medical terms with retrieved definitions, and asks it and the embedder together.

    python benchmarks/retrieval.py --model FOLDER --output EMBEDDER
    python benchmarks/rag.py --model FOLDER --embedder EMBEDDER --output RUN

The questions of the last part are about terms that neither model was trained on; what is searched are the definitions
of all of these.
"""

import argparse
import random
from pathlib import Path

from definitions import ontology
from retrieval import pairs, split

from zagora_jax import DistributedTrainer, EmbeddingTrainer, PassageIndex, Rag, grounded_rows

QUESTIONS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the base model of the generator")
    parser.add_argument("--embedder", type=Path, required=True, help="the run of benchmarks/retrieval.py")
    parser.add_argument("--output", type=Path, required=True, help="the generator's run directory")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows-at-a-time", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    training, held_out = (list(map(as_example, rows)) for rows in split(pairs(ontology())))
    training = random.Random(1).sample(training, given.steps * given.rows_at_a_time)
    embedder = EmbeddingTrainer.from_run(given.embedder)
    rows = grounded_rows(training, PassageIndex(embedder.embed, (example["passage"] for example in training)))
    generator = DistributedTrainer(
        given.model, gradient_accumulation_steps=1, output=str(given.output), compute_dtype=given.dtype, log_every=1
    )
    generator.train(
        rows,
        max_steps=given.steps,
        per_device_train_batch_size=given.rows_at_a_time,
        learning_rate=5e-4,
        sequence_length=320,
        remat="none",
    )
    index = PassageIndex(embedder.embed, (example["passage"] for example in held_out))
    asked = random.Random(2).sample(held_out, QUESTIONS)
    answers = Rag(index, generator.generate).ask([example["question"] for example in asked], max_new_tokens=64)
    found = sum(example["passage"] in answer.found for example, answer in zip(asked, answers, strict=True))
    cited = sum(example["passage"] in answer.cited for example, answer in zip(asked, answers, strict=True))
    some = sum(bool(answer.cited) for answer in answers)
    said = sum(example["answer"] == answer.text for example, answer in zip(asked, answers, strict=True))
    for example, answer in list(zip(asked, answers, strict=True))[:5]:
        print(f"\n> {example['question']}\n{answer.text}\nfrom: {'; '.join(answer.cited) or 'nothing'}")
    print(f"\nof {QUESTIONS} questions over {len(index.passages)} passages: right passage among 3 found {found}, cited")
    print(f"{cited}; some passage cited {some}; answer word for word the definition {said}")


def as_example(row: dict[str, str]) -> dict[str, str]:
    return {"question": f"Define: {row['query']}", "answer": row["positive"], "passage": row["positive"]}


if __name__ == "__main__":
    main()
