"""Tiny tokenizers of the kinds that models ship, made on the spot."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The marks leave out the end token.
CHATML_MARKED_SHORT = CHATML_MARKED.replace(
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
    "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)
# Ignores add_generation_prompt.
CHATML_WITHOUT_PROMPT = CHATML.split("{% if add_generation_prompt %}")[0]
LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# As Qwen3: an empty reasoning block in the last answer, reasoning of earlier answers dropped.
QWEN3 = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{% elif message['role'] == 'assistant' and '</think>' not in content %}"
    "{% set content = '<think>\n\n</think>\n\n' + content %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen2.5: tools in the system turn, calls laid out as JSON between marks, results in the user's name.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + ('user' if message.role == 'tool' else message.role) }}"
    "{% if message.content %}{{ '\n' + message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes no end token after an answer.
ENDLESS = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '.\n' }}" + CHATML

CORPUS = [
    "The river Arda rises in the Rhodope mountains, and an assistant answers what the user asked about it.",
    "What is the capital of Bulgaria? Sofia. system user assistant",
    "Hello, world! Numbers: 0 1 2 3 4 5 6 7 8 9. \n\n Hi\n there  again",
] * 4


def byte_level(
    chat_template: str | None = CHATML,
    *,
    special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos: str = "<|im_start|>",
    eos: str = "<|im_end|>",
    add_bos: bool = False,
    trim_offsets: bool = False,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as GPT-2's, Llama 3's and Qwen's are; pad = eos."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    core.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=eos, name_or_path="tiny-byte-level"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def llama3(chat_template: str | None = LLAMA3) -> PreTrainedTokenizerFast:
    """As Llama 3's: the template writes a BOS, and the tokenizer adds one too."""
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return byte_level(chat_template, special=special, bos="<|begin_of_text|>", eos="<|eot_id|>", add_bos=True)


def llama2(chat_template: str | None = LLAMA2) -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces become U+2581, one is put before the text, unknown characters fall back to bytes."""
    core = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    core.train_from_iterator([word for line in CORPUS for word in line.split()], trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", name_or_path="tiny-llama-2"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
