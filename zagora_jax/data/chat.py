"""From what a row says to the text that the model sees, with the character spans that the model learns to write.

How each form is rendered:

| form | the tokenizer has a chat template | it has none |
|---|---|---|
| `PlainText` | the text; all of it is learned | the same |
| `Conversation` | the template; every assistant turn is learned | refused |
| `Completion` | a user turn and an assistant turn | prompt and completion, joined as they stand |
| `Instruction` | a user turn (instruction, blank line, input), an assistant turn | Alpaca's prompt, then the output |

Each span carries the weight of its text in the loss; an assistant turn of weight 0 has none.

Stock chat templates do not say what the assistant wrote. Where a template has `{% generation %}` marks they are used;
otherwise the conversation is rendered again with a probe for each answer, and both renderings must agree around it.
What the template puts before the answer (a role header, an empty reasoning block) is not learned.
"""

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from zagora_jax.data.rows import Completion, Conversation, Form, Instruction, PlainText, TokenRow
from zagora_jax.data.sources import Location
from zagora_jax.data.template_limits import CHARACTERS, TemplateLimitError, require_harmless, within_limits
from zagora_jax.data.turns import CALLS, Turn
from zagora_jax.errors import UserError

GENERATION_MARK = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")

# Some templates write today's date. A fixed one keeps the tokens of a run the same when it is resumed on another day;
# this is the date that Llama 3's own templates fall back to.
TEMPLATE_DATE = datetime(2024, 7, 26)

# Templates get the date from a function, which only a macro of the template itself can replace.
_FIXED_DATE = (
    "{% macro strftime_now(form) %}{{ form"
    + "".join(f".replace('%{code}', '{TEMPLATE_DATE.strftime('%' + code)}')" for code in "aAbBdeHIjmMpSyY")
    + " }}{% endmacro %}\n"
)

# Stands in for an answer to find where a template puts it; a private-use character that no text holds.
PROBE = "\uf8ff"


class Span(NamedTuple):
    """Characters [start, end) of a text, and the weight of their tokens in the loss."""

    start: int
    end: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row's text. `spans` are what the model learns, without end tokens.

    A `chat` text holds the special tokens that its template wrote; any other gets the tokenizer's own around it.
    """

    text: str
    spans: tuple[Span, ...]
    chat: bool


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """What to call a tokenizer in a message."""
    return tokenizer.name_or_path or "the tokenizer"


def has_generation_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template of the tokenizer tells by itself what the assistant wrote."""
    templates = tokenizer.chat_template or ""
    return any(map(GENERATION_MARK.search, templates.values() if isinstance(templates, dict) else [templates]))


def render(form: Form, tokenizer: PreTrainedTokenizerBase, location: Location) -> Rendered:
    """Renders one row as the table above says.

    Raises:
        UserError: the template refuses the row, or what the assistant wrote cannot be told apart from the rest.
        ValueError: the row has tokens in place of text.
    """
    match form:
        case PlainText(text, weight):
            return Rendered(text, (Span(0, len(text), weight),) if weight else (), chat=False)
        case Conversation():
            return render_conversation(form, tokenizer, location)
        case Completion(prompt, completion, weight) if tokenizer.chat_template:
            _refuse_rendered_prompt(prompt, tokenizer, location)
            return render_conversation(_exchange(prompt, completion, weight), tokenizer, location)
        case Completion(prompt, completion, weight):
            return _joined(prompt, completion, weight)
        case Instruction(instruction, given, output, weight) if tokenizer.chat_template:
            request = f"{instruction}\n\n{given}" if given else instruction
            return render_conversation(_exchange(request, output, weight), tokenizer, location)
        case Instruction(instruction, given, output, weight):
            return _joined(alpaca_prompt(instruction, given), output, weight)
        case TokenRow():
            raise ValueError("a row of tokens has no text to render")


def _exchange(request: str, answer: str, weight: float) -> Conversation:
    return Conversation((Turn("user", request), Turn("assistant", answer, weight)))


def alpaca_prompt(instruction: str, given: str) -> str:
    """The prompt of Stanford's Alpaca, for models without a chat template."""
    if not given:
        return (
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            f"\n\n### Instruction:\n{instruction}\n\n### Response:\n"
        )
    return (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request."
        f"\n\n### Instruction:\n{instruction}\n\n### Input:\n{given}\n\n### Response:\n"
    )


def _joined(prompt: str, completion: str, weight: float) -> Rendered:
    span = Span(len(prompt), len(prompt) + len(completion), weight)
    return Rendered(prompt + completion, (span,) if weight else (), chat=False)


def _refuse_rendered_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase, location: Location) -> None:
    for token in tokenizer.all_special_tokens:
        if prompt.lstrip().startswith(token):
            raise UserError(
                f"{location}, field prompt: expected a prompt without a chat template, found {token!r} at its start; "
                "give the turns as {messages}, so that the model's template is applied once"
            )


def render_conversation(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, location: Location) -> Rendered:
    """Renders turns with the tokenizer's chat template and finds what the assistant wrote."""
    template = _Template(tokenizer, conversation.tools, location)
    turns = conversation.turns
    template.require_keys({"tools"} if conversation.tools else set(), *(turn.extra.keys() - {"name"} for turn in turns))
    if template.marks_generations:
        text, marks = template.render(turns, marks=True)
        spans = _marked_spans(text, marks, turns, tokenizer, template)
    else:
        text, _ = template.render(turns)
        spans = _spans_around_probes(text, turns, template)
        for index in range(len(turns)):
            if _is_learned(turns[index]) and index not in spans:
                spans[index] = _span_after_prompt(text, turns, index, tokenizer, template)
    learned = (index for index, turn in enumerate(turns) if _is_learned(turn))
    return Rendered(text, tuple(Span(*spans[index], turns[index].weight) for index in learned), chat=True)


def _is_learned(turn: Turn) -> bool:
    return turn.role == "assistant" and turn.weight > 0


def _is_laid_out(turn: Turn) -> bool:
    """Whether the template lays out more than a text, such as calls of tools."""
    return not turn.extra.keys() <= {"name"}


class _Template:
    """A tokenizer's chat template, run in transformers' sandbox, with errors that name the row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]], location: Location):
        self._tokenizer = tokenizer
        self._tools: Any = list(tools) or None
        self._location = location
        try:
            self._source = tokenizer.get_chat_template(tools=self._tools)
        except ValueError as error:
            raise UserError(
                f"{location}: a row of turns needs a chat template, and {name_of(tokenizer)} has no default one; "
                "use a model that has one, or rows of {text} or {prompt, completion}"
            ) from error
        if "strftime_now" in self._source:
            self._source = _FIXED_DATE + self._source
        try:
            require_harmless(self._source)
        except TemplateLimitError as error:
            raise self.error(f"{error}") from error
        self.marks_generations = GENERATION_MARK.search(self._source) is not None

    def render(
        self, turns: Sequence[Turn], *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and with `marks` the character spans of its generations; `prompt` adds the assistant's header."""
        special_tokens: dict[str, Any] = self._tokenizer.special_tokens_map
        messages = [turn.message() for turn in turns]

        def rendered() -> Any:
            return render_jinja_template(
                conversations=[messages],
                tools=self._tools,
                chat_template=self._source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **special_tokens,
            )

        try:
            texts, spans = within_limits(rendered)
        except TemplateLimitError as error:
            raise self.error(f"{error}") from error
        except Exception as error:  # a template is a program: it may raise anything
            raise self.error(f"refuses the row: {error}") from error
        if len(texts[0]) > CHARACTERS:
            raise self.error(f"makes {len(texts[0]):,} characters of the row, more than {CHARACTERS:,}")
        return texts[0], spans[0] if marks else []

    def require_keys(self, *groups: Set[str]) -> None:
        """Refuses what the template would leave out of the text in silence.

        A template names the keys that it reads; the id of a call is for a program to match, and many leave it out.
        """
        for key in sorted(set().union(*groups) - {"tool_call_id"}):
            if key not in self._source:
                raise self.error(f"knows no {key}, which the row has; take it out of the row, or use another model")

    def error(self, what: str) -> UserError:
        return UserError(f"{self._location}: the chat template of {name_of(self._tokenizer)} {what}")


def _spans_around_probes(text: str, turns: Sequence[Turn], template: _Template) -> dict[int, tuple[int, int]]:
    """The spans of answers that are a text, by turn; empty unless probes in their place show where they stand.

    They do if `text` is the conversation with probes for answers, each probe replaced by its answer.
    """
    probed = [index for index, turn in enumerate(turns) if _is_learned(turn) and not _is_laid_out(turn)]
    with_probes = [replace(turn, content=PROBE) if index in probed else turn for index, turn in enumerate(turns)]
    first, *others = template.render(with_probes)[0].split(PROBE)
    if not probed or len(others) != len(probed) or not text.startswith(first):
        return {}
    spans = {}
    position = len(first)
    for index, following in zip(probed, others, strict=True):
        answer = turns[index].content
        written = next((form for form in (answer, answer.strip()) if text.startswith(form + following, position)), None)
        if written is None:
            return {}
        spans[index] = (position, position + len(written))
        position += len(written) + len(following)
    lead = _lead(first, turns[: probed[0]], template)
    return {
        index: (start - len(lead) if text.endswith(lead, 0, start) else start, end)
        for index, (start, end) in spans.items()
    }


def _lead(header: str, before: Sequence[Turn], template: _Template) -> str:
    """White space that the template puts between prompt and answer, which the model has to write.

    `header` is the text before an answer, `before` the turns in it. Without any, there is no prompt to compare with.
    """
    if not before:
        return ""
    lead = header.removeprefix(template.render(before, prompt=True)[0])
    return "" if lead.strip() else lead


def _span_after_prompt(
    text: str, turns: Sequence[Turn], index: int, tokenizer: PreTrainedTokenizerBase, template: _Template
) -> tuple[int, int]:
    """The span of the answer at `index`, where the rendering of the turns before it and its header ends.

    This finds answers that the template renders by their content, such as a reasoning block that it takes apart, and
    calls of tools, which it lays out itself.
    """
    prompt = template.render(turns[:index], prompt=True)[0] if index else ""
    has_header = index > 0 and prompt != template.render(turns[:index])[0]
    if has_header and text.startswith(prompt):
        start, answer = len(prompt), turns[index].content.strip()
        if _is_laid_out(turns[index]):
            # It ends where the first special token stands that does not begin it.
            special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
            ends = (text.find(token, start + 1) for token in special)
            if end := min((end for end in ends if end > 0), default=0):
                return start, start + len(text[start:end].rstrip())
        elif text[start:].lstrip().startswith(answer):
            return start, text.index(answer, start) + len(answer)
    raise template.error(
        f"does not render turn {index + 1} (assistant) as it was written, so its tokens cannot be told apart "
        "(templates that drop earlier reasoning do this); change the row, give the turn the weight 0, or add "
        "{% generation %} marks to the template"
    )


def _marked_spans(
    text: str,
    marks: list[tuple[int, int]],
    turns: Sequence[Turn],
    tokenizer: PreTrainedTokenizerBase,
    template: _Template,
) -> dict[int, tuple[int, int]]:
    """The marked spans by turn, without the end tokens that they may hold."""
    answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    if len(marks) != len(answers):
        raise template.error(f"marks {len(marks)} generations, expected {len(answers)}, one for each assistant turn")
    spans, holds_more = {}, False
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    for number, ((start, end), index) in enumerate(zip(marks, answers, strict=True), start=1):
        body, answer = text[start:end].rstrip(), turns[index].content.strip()
        if not (answer and body.endswith(answer)):
            closing = max((token for token in added if body.endswith(token)), key=len, default="")
            body = body.removesuffix(closing)
        if CALLS not in turns[index].extra and not body.rstrip().endswith(answer):
            raise template.error(f"does not mark assistant turn {number} as it was written")
        holds_more |= body.strip() != answer
        spans[index] = (start, start + len(body))
    if holds_more:
        _refuse_marked_prompts(turns, template)
    return spans


def _refuse_marked_prompts(turns: Sequence[Turn], template: _Template) -> None:
    """Refuses marks that hold what others than the assistant say, which probes in its place show."""
    probed = [turn if turn.role == "assistant" else replace(turn, content=PROBE) for turn in turns]
    text, marks = template.render(probed, marks=True)
    if any(PROBE in text[start:end] for start, end in marks):
        raise template.error("marks turns of others as the assistant's generation; correct its {% generation %} marks")
