"""Retrieval-augmented generation: passages that an embedder finds, and answers by a generator that says whence.

The generator is a language model that `DistributedTrainer` tunes on `grounded_rows`: a question with numbered passages,
and an answer that begins with the number of the passage that it is from, as in [2]: the choice of a passage comes
before the words that are from there, so that the two agree.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zagora_jax.data.in_memory import texts_of
from zagora_jax.errors import UserError

INSTRUCTION = (
    "Answer the question by the passages below. Begin the answer with the number of the passage that it is from, as in "
    "[1]. If none of them has the answer, say: {no_answer}"
)
NO_ANSWER = "The passages do not say."
CHUNK_QUESTIONS = 256  # whose scores for all passages exist at a time
_CITATION = re.compile(r"\[(\d+)\]")


class Embed(Protocol):
    """What makes vectors of texts, such as `EmbeddingTrainer.embed`."""

    def __call__(self, texts: Sequence[str], *, query: bool = False) -> np.ndarray:
        """Return unit vectors float32 [N, D], of queries or of passages."""


class Generate(Protocol):
    """What answers prompts, such as `DistributedTrainer.generate`."""

    def __call__(self, prompts: Sequence[str], *, max_new_tokens: int) -> Sequence[str]:
        """Return an answer to each prompt."""


class PassageIndex:
    """Passages that can be searched by what they mean; all vectors are in memory."""

    def __init__(self, embed: Embed, passages: Iterable[str]):
        """Embed the passages, each text once.

        Raises:
            UserError: there are none.
        """
        self.passages = tuple(dict.fromkeys(texts_of(passages, "passages")))
        if not self.passages:
            raise UserError("passages: expected at least one, found none")
        self._embed = embed
        self._vectors = embed(self.passages)  # [P, D]

    def search(self, questions: Sequence[str], count: int) -> list[list[int]]:
        """Return the numbers of the `count` nearest passages of each question, the nearest first.

        Raises:
            UserError: there are not so many.
        """
        if not 1 <= count <= len(self.passages):
            raise UserError(f"passages to find: expected 1 to {len(self.passages)}, found {count}")
        found: list[list[int]] = []
        for start in range(0, len(questions), CHUNK_QUESTIONS):
            chunk = questions[start : start + CHUNK_QUESTIONS]
            scores = self._embed(chunk, query=True) @ self._vectors.T  # [q, P]
            found += np.argsort(-scores, axis=1, kind="stable")[:, :count].tolist()
        return found


def grounded_prompt(question: str, passages: Sequence[str]) -> str:
    """Put a question behind numbered passages, as the generator is trained to read them."""
    numbered = "\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, start=1))
    return f"{INSTRUCTION.format(no_answer=NO_ANSWER)}\n\n{numbered}\n\nQuestion: {question}"


def grounded_rows(
    examples: Iterable[Mapping[str, str]],
    index: PassageIndex,
    count: int = 3,
    *,
    unanswerable: float = 0.1,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Make rows to train a generator on: what the embedder finds for a question, the nearest first, and the answer.

    So a generator learns how far the first one is to be trusted: `Rag` shows them in the same order. Where the
    embedder has missed the right passage, that takes the place of the last one found. In the part `unanswerable` of
    the rows, chosen by the seed, it is left out, and the answer is NO_ANSWER (RAFT, arXiv:2403.10131).

    Args:
        examples: {question, answer, passage}; the passage is one of the index's.
        index: what is searched.
        count: passages in a row.
        unanswerable: see above.
        seed: of what is left out.

    Returns:
        Rows {messages}.

    Raises:
        UserError: an example lacks something, or its passage is not in the index.
    """
    places = {passage: place for place, passage in enumerate(index.passages)}
    chosen = [_checked(example, number, places) for number, example in enumerate(examples, start=1)]
    if not chosen:
        return []
    random = np.random.default_rng(seed)
    found = index.search([example["question"] for example in chosen], min(count + 1, len(index.passages)))
    rows = []
    for example, numbers in zip(chosen, found, strict=True):
        right = places[example["passage"]]
        others = [place for place in numbers if place != right]
        has_answer = random.random() >= unanswerable or not others
        shown = numbers[:count] if has_answer else others[:count]
        if has_answer and right not in shown:
            shown = [*shown[:-1], right]
        answer = f"[{shown.index(right) + 1}] {example['answer']}" if has_answer else NO_ANSWER
        prompt = grounded_prompt(example["question"], [index.passages[place] for place in shown])
        rows.append({"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]})
    return rows


def _checked(example: Mapping[str, str], number: int, places: Mapping[str, int]) -> Mapping[str, str]:
    for key in ("question", "answer", "passage"):
        if not isinstance(example.get(key), str) or not example[key].strip():
            raise UserError(f"example {number}: expected the texts question, answer and passage, found no {key}")
    if example["passage"] not in places:
        raise UserError(f"example {number}: its passage is none of the index: {example['passage']:.60}")
    return example


@dataclass(frozen=True)
class Answer:
    """An answer and what it is from.

    Attributes:
        text: the answer, without the numbers of passages.
        cited: the passages that it names, in its order; empty where it names none.
        found: the passages that the generator was shown, the nearest first.
    """

    text: str
    cited: tuple[str, ...]
    found: tuple[str, ...]


class Rag:
    """Answers questions from passages.

    ```
    rag = Rag(PassageIndex(embedder.embed, passages), generator.generate)
    print(rag.ask(["What is Champagne cork sign?"]))
    ```
    """

    def __init__(self, index: PassageIndex, generate: Generate, count: int = 3):
        """Search `index` for `count` passages a question, and let `generate` answer."""
        self._index, self._generate, self._count = index, generate, count

    def ask(self, questions: Sequence[str], *, max_new_tokens: int = 128) -> list[Answer]:
        """Answer each question."""
        questions = texts_of(questions, "questions")
        found = [
            tuple(self._index.passages[place] for place in places)
            for places in self._index.search(questions, self._count)
        ]
        prompts = [grounded_prompt(question, shown) for question, shown in zip(questions, found, strict=True)]
        texts = self._generate(prompts, max_new_tokens=max_new_tokens)
        return [_read(text, shown) for text, shown in zip(texts, found, strict=True)]


def _read(text: str, shown: tuple[str, ...]) -> Answer:
    """Part an answer from its citations; a number that no passage has is none."""
    numbers = dict.fromkeys(int(number) for number in _CITATION.findall(text))
    cited = tuple(shown[number - 1] for number in numbers if 1 <= number <= len(shown))
    return Answer(" ".join(_CITATION.sub("", text).split()), cited, shown)
