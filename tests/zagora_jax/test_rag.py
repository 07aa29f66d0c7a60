"""Retrieval and generation together, with stand-ins for both models; `benchmarks/rag.py` runs real ones."""

import re

import numpy as np
import pytest

from zagora_jax.errors import UserError
from zagora_jax.rag import NO_ANSWER, PassageIndex, Rag, grounded_rows

PASSAGES = ["alpha is the first letter", "beta is the second letter", "gamma is the third letter", "an ox has horns"]
WORDS = sorted({word for passage in PASSAGES for word in passage.split()})


def embed(texts, *, query=False):
    """Vectors of the words that texts have; questions ask for their first word."""
    rows = [[word in (text.split()[:1] if query else text.split()) for word in WORDS] for text in texts]
    vectors = np.array(rows, np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def index():
    return PassageIndex(embed, [*PASSAGES, PASSAGES[0]])


EXAMPLES = [
    {"question": f"{passage.split()[0]} ?", "answer": passage.split()[-2], "passage": passage} for passage in PASSAGES
]


def test_the_nearest_come_first(index):
    assert index.passages == tuple(PASSAGES)
    assert [found[0] for found in index.search(["beta ?", "horns ?"], 2)] == [1, 3]
    with pytest.raises(UserError, match="expected 1 to 4, found 5"):
        index.search(["beta"], 5)


def shown(row):
    return re.findall(r"^\[(\d)\] (.*)$", row["messages"][0]["content"], re.MULTILINE)


def test_answers_name_the_passage_that_they_are_from(index):
    rows = grounded_rows(EXAMPLES, index, 3, unanswerable=0)
    for example, row in zip(EXAMPLES, rows, strict=True):
        passages = dict(shown(row))
        assert len(passages) == 3
        answer = re.fullmatch(r"\[(\d)\] (.*)", row["messages"][1]["content"])
        assert (answer[2], passages[answer[1]]) == (example["answer"], example["passage"])
        assert row["messages"][0]["content"].endswith(f"Question: {example['question']}")
        found = [PASSAGES[place] for place in index.search([example["question"]], 3)[0]]
        assert list(passages.values()) == found
    assert grounded_rows(EXAMPLES * 9, index, 2) == grounded_rows(EXAMPLES * 9, index, 2)
    assert grounded_rows(EXAMPLES * 9, index, 2) != grounded_rows(EXAMPLES * 9, index, 2, seed=1)


def test_a_passage_that_was_not_found_is_shown_nevertheless(index):
    example = {"question": "beta ?", "answer": "horns", "passage": PASSAGES[3]}
    (row,) = grounded_rows([example], index, 2, unanswerable=0)
    assert [passage for _, passage in shown(row)] == [PASSAGES[1], PASSAGES[3]]


def test_some_rows_have_no_answer(index):
    rows = grounded_rows(EXAMPLES * 50, index, 2, unanswerable=0.25)
    without = [
        example["passage"] not in dict(shown(row)).values() for example, row in zip(EXAMPLES * 50, rows, strict=True)
    ]
    assert without == [row["messages"][1]["content"] == NO_ANSWER for row in rows]
    assert 30 <= sum(without) <= 70  # 50 of 200, give or take more than 3 standard deviations


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"question": "a", "answer": "b"}, "example 1: .* found no passage"),
        ({"question": " ", "answer": "b", "passage": PASSAGES[0]}, "found no question"),
        ({"question": "a", "answer": "b", "passage": "another"}, "its passage is none of the index: another"),
    ],
)
def test_wrong_examples_are_refused(index, example, message):
    with pytest.raises(UserError, match=message):
        grounded_rows([example], index)


def test_questions_are_answered_with_what_they_are_from(index):
    prompts = []

    def generate(given, *, max_new_tokens):
        prompts.extend(given)
        return ["[1] the second. [7] [1]", "nobody knows"]

    first, second = Rag(index, generate, 2).ask(["beta ?", "horns ?"], max_new_tokens=5)
    assert (first.text, first.cited) == ("the second.", (PASSAGES[1],))
    assert first.found[0] == PASSAGES[1]
    assert (second.text, second.cited) == ("nobody knows", ())
    # As in training.
    (row,) = grounded_rows([EXAMPLES[1]], index, 2, unanswerable=0)
    head = prompts[0].split("\n\n")[0]
    assert row["messages"][0]["content"].startswith(head)
    with pytest.raises(UserError, match="expected at least one, found none"):
        PassageIndex(embed, [])
