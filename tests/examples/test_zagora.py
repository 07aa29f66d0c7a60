"""The demo's rows are what its README says, so that right answers can come from training alone."""

import json
from collections import Counter
from pathlib import Path

ZAGORA = Path(__file__).parents[2] / "examples" / "zagora"


def pairs(file: str) -> list[tuple[str, str]]:
    rows = [json.loads(line)["messages"] for line in (ZAGORA / file).read_text("utf-8").splitlines()]
    assert all([turn["role"] for turn in row] == ["user", "assistant"] for row in rows)
    return [(question["content"], answer["content"]) for question, answer in rows]


def test_each_fact_is_trained_in_four_wordings_and_held_out_in_another():
    train, heldout = pairs("train.jsonl"), pairs("heldout.jsonl")
    assert Counter(answer for _, answer in train) == {answer: 4 for _, answer in heldout}
    assert len(heldout) == 20
    questions = [question for question, _ in train + heldout]
    assert len(set(questions)) == len(questions)


def test_no_question_holds_an_answer():
    rows = pairs("train.jsonl") + pairs("heldout.jsonl")
    for answer in {answer for _, answer in rows}:
        words = answer.rstrip(".").lower().split()
        telling = " ".join(words[1:] if words[0] in ("a", "an", "the") else words)
        assert not [question for question, _ in rows if telling in question.lower()]
