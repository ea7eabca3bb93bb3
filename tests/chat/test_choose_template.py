"""Which template a model gets, and what a model's own one can do (DESIGN A5)."""

import pytest

from akv_jax.chat.choose_template import ChatFormat, TemplateError, chat_format, find_difference, find_problem
from akv_jax.chat.messages import Message, Tool, ToolCall
from akv_jax.chat.template import EndTokens, PlainTemplate, render
from akv_jax.chat.tokenise import Encoder
from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.errors import RequestError

ENDS = EndTokens({2: "<|im_end|>", 0: "<|endoftext|>"})
SYSTEM, USER = Message("system", "Be brief."), Message("user", "Hi")
THOUGHTFUL = Message("assistant", "Sure.", "Hm.", (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")))
TOOLS = (Tool("f", '{"type": "function", "function": {"name": "f"}}'),)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = (
    "{{ bos_token }}{% for m in messages %}{{ '<file_sep>' + m.role + '\n' + m.content | trim + '<|endoftext|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<file_sep>assistant\n' }}{% endif %}"
)


def choose(tokenizer: Tokenizer, template: str | None) -> ChatFormat:
    return chat_format(tokenizer, template, bos_token="<repo_name>", eos_token_ids=(0, 2))


def test_without_a_template_the_vocabulary_decides(tokenizer: Tokenizer) -> None:
    assert choose(tokenizer, None).template.name == "chatml"


def test_chatml_learns_the_models_own_ways(tokenizer: Tokenizer) -> None:
    assert render(choose(tokenizer, CHATML).template, (USER,)) == "<|im_start|>user\nHi<|im_end|>\n"
    with_bos = choose(tokenizer, "{{ bos_token }}" + CHATML)
    assert with_bos.template.name == "chatml"
    assert render(with_bos.template, (USER,)).startswith("<repo_name><|im_start|>user")
    wrapped = CHATML.replace(
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}",
        "{% if m.role == 'tool' %}"
        "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endif %}",
    )
    text = render(choose(tokenizer, wrapped).template, (USER, Message("tool", "42")))
    assert text.endswith("<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n")


def test_a_stock_template_that_rewrites_earlier_turns_is_replaced(tokenizer: Tokenizer) -> None:
    """As Qwen3's: empty reasoning in a reply only as long as it is the last message."""
    mark = "('<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' else '')"
    rewriting = CHATML.replace("m['content']", mark + " + m['content']")
    assert find_problem(ChatFormat(PlainTemplate(rewriting, ENDS), tokenizer, ENDS, Encoder(tokenizer), False))
    chat = choose(tokenizer, rewriting)
    assert chat.template.name == "chatml"
    assert find_problem(chat) is None


def test_another_append_only_template_is_used_for_plain_text(tokenizer: Tokenizer) -> None:
    chat = choose(tokenizer, BLOCKS)
    assert chat.template.name == "stock"
    messages = (SYSTEM, Message("user", "  user \n"), Message("assistant", "user"))
    tokenised = chat.tokenise(messages)
    texts = [tokenizer.decode(tokenised.token_ids[a:b]) for a, b in tokenised.message_spans]
    assert texts == [
        "<repo_name><file_sep>system\nBe brief.<|endoftext|>\n",
        "<file_sep>user\nuser<|endoftext|>\n",
        "<file_sep>assistant\nuser<|endoftext|>\n",
    ]
    for k, parts in enumerate(tokenised.part_spans):
        (a, b), *_ = parts["content"]
        assert tokenizer.decode(tokenised.token_ids[a:b]) == messages[k].content.strip()
        assert tokenizer.decode(tokenised.token_ids[b : tokenised.message_spans[k][1]]) == "<|endoftext|>\n"
    continued = chat.tokenise(messages, generation_prompt=False, continue_final=True)
    assert tokenizer.decode(continued.token_ids).endswith("<file_sep>assistant\nuser")
    sampled = chat.tokenise((USER, Message("assistant", token_ids=(500, 0)), USER))
    before = chat.tokenise((USER,)).token_ids
    assert sampled.token_ids[: len(before) + 2] == (*before, 500, 0)


@pytest.mark.parametrize(
    "beginning",
    ["", "{% if messages[0].role == 'assistant' %}{{ raise_exception('who began?') }}{% endif %}"],
)
def test_a_stock_template_is_split_the_same_either_way(tokenizer: Tokenizer, beginning: str) -> None:
    """By pairs of messages, or by prefixes where the template would refuse a pair."""
    plain, strict = (PlainTemplate(start + BLOCKS, ENDS, bos_token="<repo_name>") for start in ("", beginning))
    messages = (SYSTEM, *(Message(("user", "assistant")[k % 2], f" {k}") for k in range(9)))
    options = {"generation_prompt": True, "continue_final": False}
    pieces = list(strict.pieces(messages, (), **options))
    assert pieces == list(plain.pieces(messages, (), **options))
    assert "".join(piece.text for piece in pieces) == plain.render(messages, generation_prompt=True)
    assert [p.text for p in pieces if p.part == "content"] == [m.content.strip() for m in messages]


@pytest.mark.parametrize(
    ("messages", "tools", "param"),
    [
        ((USER,), TOOLS, "tools"),
        ((USER, Message("assistant", reasoning="r")), (), "messages[1].reasoning_content"),
        ((USER, Message("assistant", tool_calls=THOUGHTFUL.tool_calls)), (), "messages[1].tool_calls"),
    ],
)
def test_plain_templates_lose_nothing_silently(
    tokenizer: Tokenizer, messages: tuple[Message, ...], tools: tuple[Tool, ...], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        choose(tokenizer, BLOCKS).tokenise(messages, tools)
    assert caught.value.param == param


def test_a_template_that_refuses_is_a_clear_error(tokenizer: Tokenizer) -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="no tools here") as caught:
        choose(tokenizer, strict + BLOCKS).tokenise((USER, Message("tool", "42")))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        # Counts the messages, so an earlier prompt is no prefix of a later one.
        ("{{ messages | length }}" + BLOCKS, "not append-only|rewrites earlier"),
        # Marks the last message.
        (BLOCKS.replace("'<file_sep>' +", "('>' if loop.last else '') + '<file_sep>' +"), "rewrites|append-only"),
        # Loses the assistant's words.
        (BLOCKS.replace("m.content | trim", "(m.content | trim if m.role != 'assistant' else '')"), "not show"),
        # The generation prompt is not how a reply begins.
        (BLOCKS.replace("'<file_sep>assistant\n' }}", "'<file_sep>assistant: ' }}"), "generation prompt"),
        ("{% for m in messages %}", "not valid jinja"),
        ("{{ raise_exception('never') }}", "refuses an ordinary conversation: .*never"),
    ],
)
def test_unusable_templates_are_refused_at_start_up(tokenizer: Tokenizer, template: str, why: str) -> None:
    with pytest.raises(TemplateError, match=why):
        choose(tokenizer, template)


def test_templates_run_in_a_sandbox(tokenizer: Tokenizer) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(TemplateError, match=r"unsafe|undefined"):
        choose(tokenizer, escape + BLOCKS)


def test_difference_and_problem_are_found(chat: ChatFormat) -> None:
    stock = PlainTemplate(CHATML, ENDS)
    assert find_difference(chat.template, stock) is not None  # it has no default system text
    assert find_problem(chat) is None
