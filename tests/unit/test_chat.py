"""Chat messages and templates."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from services.frontend.chat import ChatTemplate, check_messages
from services.frontend.request import ValidationFailed
from services.frontend.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from worker.loader.errors import ModelError
from worker.loader.model import open_model

HELLO = [{"role": "user", "content": "Hello"}]


def template(source: str, **tokens: str | None) -> ChatTemplate:
    return ChatTemplate(source, **{"bos_token": "<s>", "eos_token": "</s>", **tokens})


def test_messages_are_written_with_the_template() -> None:
    messages = check_messages([{"role": "system", "content": "Be brief"}, *HELLO], 10)
    chat = template(CHAT_TEMPLATE)
    text = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert chat.render(messages) == text + "<|im_start|>assistant\n"
    assert chat.render(messages, add_generation_prompt=False) == text


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = check_messages(
        [{"role": "developer", "content": parts}, {"role": "user", "content": "", "name": "x"}], 10
    )
    assert messages == ({"role": "system", "content": "a\nb"}, {"role": "user", "content": "", "name": "x"})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hello", "messages"),
        ({"role": "user"}, "messages"),
        (HELLO * 11, "messages"),
        (["Hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "function", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "x", "name": 7}], "messages[0].name"),
    ],
)
def test_other_messages_are_refused_by_name(messages: Any, param: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        check_messages(messages, 10)
    assert caught.value.param == param
    assert param in caught.value.message
    assert "\n" not in caught.value.message


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(ValidationFailed, match="says: no system please"):
        template("{{ raise_exception('no system please') }}").render(HELLO)


def test_a_template_that_fails_is_an_error_with_its_reason() -> None:
    with pytest.raises(ValidationFailed, match="cannot write them"):
        template("{{ messages[5].content.x }}").render(HELLO)


def test_a_template_that_is_no_jinja_is_an_error_at_start() -> None:
    with pytest.raises(ModelError, match="chat template"):
        template("{% for %}")


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"]
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(ValidationFailed):
        template(source).render(HELLO)


def test_what_templates_of_hugging_face_use() -> None:
    source = """{{ bos_token }}{% for m in messages %}
    {%- if loop.index0 > 0 %}{% break %}{% endif %}
    {% generation %}
{{ m.content | tojson }}{% endgeneration %}{% endfor %}
{{ strftime_now('%Y') }}{{ eos_token }}"""
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "unseen"}]
    year = datetime.datetime.now().year
    assert template(source, eos_token=None).render(messages) == f'<s>"<é>"{year}'


def test_arguments_reach_the_template_but_replace_nothing() -> None:
    chat = template("{{ 'think' if enable_thinking else 'do not' }}")
    assert chat.render(HELLO, arguments={"enable_thinking": True}) == "think"
    assert chat.render(HELLO) == "do not"
    with pytest.raises(ValidationFailed, match=r"chat_template_kwargs\.messages"):
        chat.render(HELLO, arguments={"messages": "x"})


def test_the_default_models_chat_has_as_many_tokens_as_with_hugging_face(default_model_path: Path) -> None:
    files = open_model(default_model_path)
    tokenizer = Tokenizer.load(files.tokenizer_file)
    assert files.chat_template is not None
    chat = ChatTemplate(files.chat_template, bos_token=files.bos_token, eos_token=files.eos_token)
    # Counts of apply_chat_template(messages, add_generation_prompt=True) of transformers 5.
    for messages, count in ((HELLO, 31), ([{"role": "system", "content": "Be brief."}, *HELLO], 18)):
        text = chat.render(messages)
        assert len(tokenizer.encode_now(text, add_special_tokens=False)) == count
