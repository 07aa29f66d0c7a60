"""Templates that loop for ever, or build texts of all the memory there is."""

import resource
import subprocess
import sys
import textwrap

import chat_tokenizers as kinds
import pytest

from zagora_jax.data import template_limits
from zagora_jax.data.chat import render
from zagora_jax.data.rows import Conversation
from zagora_jax.data.sources import Location
from zagora_jax.data.turns import Turn
from zagora_jax.errors import UserError

HERE = Location("train.jsonl", 7)
TURNS = (Turn("user", "Hi"), Turn("assistant", "Hello"))
LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}" + "{% endfor %}" * 2
)
DOUBLING = "{% set n = namespace(t='xxxxxxxx') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"


@pytest.fixture(scope="module")
def tokenizer():
    return kinds.byte_level()


def refused(tokenizer, template):
    tokenizer.chat_template = template
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError) as error:
        render(Conversation(TURNS), tokenizer, HERE)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert str(error.value).startswith("train.jsonl, line 7: the chat template of ")
    return str(error.value)


def test_a_loop_without_an_end(tokenizer, monkeypatch):
    monkeypatch.setattr(template_limits, "SECONDS", 0.2)
    assert refused(tokenizer, LOOP).endswith("takes more than 0.2 s")
    tokenizer.chat_template = kinds.CHATML  # nothing is left behind that strikes later
    assert "Hello" in render(Conversation(TURNS), tokenizer, HERE).text


def test_a_text_of_more_memory_than_there_is(tokenizer):
    assert refused(tokenizer, "{{ 'x' * 10000000000000 }}").endswith("takes more than 512 MiB of memory")
    assert refused(tokenizer, DOUBLING).endswith(("512 MiB of memory", "takes more than 10 s"))


def test_a_text_that_is_longer_than_any_row(tokenizer):
    message = refused(tokenizer, kinds.CHATML + "{{ 'x' * 20000000 }}")
    assert "makes 20,000,0" in message
    assert message.endswith("characters of the row, more than 16,777,216")


def test_a_power_of_more_digits_than_can_be_computed(tokenizer):
    assert refused(tokenizer, "\n{{ 9 ** 9 ** 9 }}").endswith("has a power (**) in line 2, which no chat needs")
    tokenizer.chat_template = kinds.CHATML + "{# 2 ** 3 #}"
    assert "Hello" in render(Conversation(TURNS), tokenizer, HERE).text


def test_one_call_without_an_end_ends_the_process():
    """Jinja's `round` computes a power, and lets no other thread run meanwhile."""
    program = """
        from zagora_jax.data import template_limits
        template_limits.CPU_SECONDS = 0.5
        template_limits.within_limits(lambda: 10 ** 10**10)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=120)
    assert done.returncode in (-26, 1)  # SIGVTALRM, or no memory for so many digits
    assert done.returncode == -26 or b"TemplateLimitError" in done.stderr


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(tokenizer, template):
    assert "refuses the row" in refused(tokenizer, template)
