"""Generation against transformers, and what an answer does not depend on."""

import pytest
from oracles import load_peft, tiny_llama, tiny_tokenizer
from runs import finished_run, tiny_config

from zagora_jax import generate, generation
from zagora_jax.commands import GenerateConfig
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.generation import Generator, Sampling, open_generator
from zagora_jax.run_directory import RunDirectory

NEW_TOKENS = 12
GREEDY = Sampling(NEW_TOKENS)
PROMPTS = [[257, 72, 101], list(range(40, 71)), [5], [300, 1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tuned tiny model, not quantised, in float32."""
    folder = tmp_path_factory.mktemp("generation")
    model = tiny_llama(folder / "model")
    config = tiny_config(model, folder / "run", folder / "rows.jsonl", quantization="none")
    return finished_run(folder / "run", config)


@pytest.fixture(scope="module")
def generator(run):
    return open_generator(str(run.path))


@pytest.fixture(scope="module")
def answers(generator):
    return generator.generate(PROMPTS, GREEDY)


def test_greedy_answers_are_those_of_transformers(run, answers):
    torch = pytest.importorskip("torch")
    network = load_peft(run.path.parent / "model", run.adapter)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([prompt])
        output = network.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=258,
            pad_token_id=0,
        )
        expected = output[0, len(prompt) :].tolist()
        assert answer == (expected[: expected.index(258)] if 258 in expected else expected)
    assert len({tuple(answer) for answer in answers}) > 1


def test_an_answer_does_not_depend_on_the_other_prompts(generator, answers, monkeypatch):
    monkeypatch.setattr(generation, "PROMPTS_AT_A_TIME", 1)
    assert generator.generate(PROMPTS, GREEDY) == answers
    assert generator.generate(PROMPTS[1:2], GREEDY) == answers[1:2]


def test_an_answer_stops_before_its_end_token(generator, answers):
    """Others go on, and there may be several end tokens."""
    end = answers[0][3]
    stopping = Generator(
        generator._graph, generator._frozen, generator._adapters, generator._tokenizer, frozenset({end, 319})
    )
    expected = [answer[: answer.index(end)] if end in answer else answer for answer in answers]
    assert expected != answers
    assert stopping.generate(PROMPTS, GREEDY) == expected


def test_sampling_is_reproducible(generator):
    def sample(seed, temperature=1.0):
        return generator.generate(PROMPTS, Sampling(NEW_TOKENS, temperature, seed))

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)
    # The likeliest token has all the weight in the limit.
    assert sample(0, 1e-5) == generator.generate(PROMPTS, GREEDY)


def test_no_prompt_no_answer(generator):
    assert generator.generate([], GREEDY) == []
    with pytest.raises(ValueError, match="without tokens"):
        generator.generate([[1], []], GREEDY)


def test_questions_go_through_the_chat_template(generator, monkeypatch):
    seen = []
    monkeypatch.setattr(generator, "generate", lambda prompts, sampling: seen.extend(prompts) or [[72, 105]])
    generator.answer(["Hi"], GREEDY)
    assert generator._tokenizer.decode(seen[0]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    generator.complete(["Hi"], GREEDY)
    assert generator._tokenizer.decode(seen[1]) == "Hi"


def test_a_model_without_a_chat_template_continues_only(run, generator, tmp_path):
    plain = tiny_tokenizer(tmp_path, chat_template=None)
    bare = Generator(generator._graph, generator._frozen, generator._adapters, plain, frozenset())
    with pytest.raises(UserError, match="has no chat template; give --chat false"):
        bare.answer(["Hi"], GREEDY)


@pytest.mark.parametrize("template", ["{{ raise_exception('tools only') }}", "{{ broken( }}"])
def test_a_chat_template_that_refuses_the_prompt_is_named(generator, tmp_path, template):
    strict = tiny_tokenizer(tmp_path, chat_template=template)
    chatting = Generator(generator._graph, generator._frozen, generator._adapters, strict, frozenset())
    with pytest.raises(UserError, match="chat template refuses the prompt Hi: "):
        chatting.answer(["Hi"], GREEDY)


def test_end_tokens_are_those_of_tokenizer_and_configs(tmp_path):
    from zagora_jax.base import open_base

    model = tiny_llama(tmp_path / "model", eos_token_id=[7, 8])
    (model / "generation_config.json").write_text('{"eos_token_id": 9}')
    base = open_base(str(model), quantization="none", dtype="float32", lora=None)
    assert generation.end_tokens(base) == {7, 8, 9, 258}


@pytest.mark.parametrize("content", ["nope", "[]", '{"eos_token_id": "2"}', '{"eos_token_id": [[2]]}'])
def test_end_tokens_that_are_none_are_named_by_file(tmp_path, content):
    from zagora_jax.base import open_base

    model = tiny_llama(tmp_path / "model")
    (model / "generation_config.json").write_text(content)
    base = open_base(str(model), quantization="none", dtype="float32", lora=None)
    with pytest.raises(UserError, match=f"{model}/generation_config.json"):
        generation.end_tokens(base)


def test_a_synthetic_run_is_refused_before_its_weights_are_made(tmp_path, monkeypatch):
    config = TrainConfig(model="synthetic:llama-3-8b", output=tmp_path / "run", max_steps=1)
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.write_config(config)
    monkeypatch.setattr("zagora_jax.base.synthetic_frozen", lambda *_: pytest.fail("made 8 B random weights"))
    with pytest.raises(UserError, match="synthetic weights have no tokenizer"):
        open_generator("synthetic:llama-3-8b")
    with pytest.raises(UserError, match="synthetic:llama-3-8b, random weights"):
        open_generator(str(run.path))


def test_a_base_model_has_no_checkpoints(run):
    with pytest.raises(UserError, match=r"--checkpoint 3: .* is no run directory"):
        open_generator(str(run.path.parent / "model"), step=3)


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def parrot(monkeypatch):
    """A generator that says what it was asked."""

    class Parrot:
        def answer(self, prompts, sampling):
            return [f"asked {prompt}" for prompt in prompts]

        def complete(self, prompts, sampling):
            return [f" completed {sampling.max_new_tokens} {sampling.temperature} {sampling.seed}" for _ in prompts]

    monkeypatch.setattr(generation, "open_generator", lambda model, step, cache: Parrot())


def test_one_prompt_is_answered_with_the_answer_alone(parrot, capsys):
    generate.main(GenerateConfig(model="run", prompt="Hi"))
    assert capsys.readouterr().out == "asked Hi\n"
    config = GenerateConfig(model="run", prompt="Hi", chat=False, max_new_tokens=3, temperature=0.5, seed=4)
    generate.main(config)
    assert capsys.readouterr().out == " completed 3 0.5 4\n"


def test_prompts_of_a_file_stand_above_their_answers(parrot, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_bytes("\ufeffOne\r\nZwei ä\n".encode())
    generate.main(GenerateConfig(model="run", prompts=tmp_path / "prompts.txt"))
    assert capsys.readouterr().out == "> One\nasked One\n\n> Zwei ä\nasked Zwei ä\n\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"prompts.txt: cannot be read: No such file"),
        (b"", r"prompts.txt:1: expected a prompt, found a blank line"),
        (b"One\n \nThree\n", r"prompts.txt:2: expected a prompt, found a blank line"),
        (b"One\n\xff\n", r"prompts.txt: expected text in UTF-8, found other bytes"),
    ],
)
def test_a_prompts_file_that_cannot_be_used_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        generate.main(GenerateConfig(model="run", prompts=tmp_path / "prompts.txt"))
