"""Chat templates against transformers' apply_chat_template."""

from __future__ import annotations

import datetime
import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nv_core.errors import ConfigError, RequestError
from nv_runtime.chat_template import ChatTemplates
from nv_runtime.conversation import render_conversation
from nv_runtime.tokenizer import Tokenizer, load_tokenizer_from_directory
from tiny_tokenizers import save_tokenizer

# Written for these tests after the structure of Qwen3's: tools, reasoning, a thinking switch.
QWEN3_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# After Llama 3's: BOS, headers, trimmed contents, a date.
LLAMA3_LIKE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model makes one tool call at a time.") }}
        {%- endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- message.tool_calls[0].function | tojson(indent=4) }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# After SmolLM2's: a default system message, no white-space control at all.
SMOLLM2_LIKE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# After Mistral's: alternating roles are enforced, BOS and EOS come from the tokenizer.
MISTRAL_LIKE = """
{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
        {% generation %}
        {% set shown = message['content'] %}
        {{ shown + eos_token }}
        {% endgeneration %}
    {% endif %}
    {% if message.get('stop') %}{% break %}{% endif %}
{% endfor %}
{{ shown is defined }}
"""

# After those of models that read parts of contents.
PARTS_LIKE = """\
{%- for message in messages %}
{{- message.role + ':' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}<{{ part.type }}>{{ part.text }}{%- endfor %}
{%- endif %}{{- '\\n' }}
{%- endfor %}"""

DOCUMENTS_LIKE = """\
{%- for document in documents or [] %}[{{ loop.index }}] {{ document.title }}: {{ document.text }}
{% endfor %}{{ messages[-1].content }}{{ 'x' if documents is none }}"""

TEMPLATES = {
    "qwen3": QWEN3_LIKE,
    "llama3": LLAMA3_LIKE,
    "smollm2": SMOLLM2_LIKE,
    "mistral": MISTRAL_LIKE,
    "parts": PARTS_LIKE,
    "documents": DOCUMENTS_LIKE,
}
KIND_OF = {"llama3": "llama3", "smollm2": "smollm", "mistral": "llama2"}

QUESTION = {"role": "user", "content": "What's <b>5 & 3</b>? 世界"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 8.\n"}
SYSTEM = {"role": "system", "content": "  Be brief. "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [QUESTION],
    "system": [SYSTEM, QUESTION],
    "three turns": [QUESTION, ANSWER, {"role": "user", "content": "And then?\n"}],
    "ends with answer": [QUESTION, {"role": "assistant", "content": "It is"}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'It\'s <now> & "here" — 世界',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TOOL_CALLS: list[dict[str, Any]] = [
    QUESTION,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Ask the tool.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
        ],
    },
    {"role": "tool", "content": "sunny & 'warm'"},
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    made = {}
    for name, template in TEMPLATES.items():
        made[name] = save_tokenizer(KIND_OF.get(name, "qwen"), root / name)
        (made[name] / "chat_template.jinja").write_text(template, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def ours(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer_from_directory(path) for name, path in directories.items()}


@pytest.fixture(scope="module")
def oracles(directories: dict[str, Path]) -> dict[str, Any]:
    return {name: AutoTokenizer.from_pretrained(path) for name, path in directories.items()}


def render(templates: str, *messages: dict[str, Any], **options: Any) -> str:  # noqa: ANN401
    options.setdefault("add_generation_prompt", False)
    return ChatTemplates({"default": templates}, {}).render(messages, **options)


@pytest.mark.parametrize(
    ("name", "conversation"),
    [
        (name, conversation)
        for name in TEMPLATES
        for conversation in CONVERSATIONS
        # Mistral's refuses system messages: see the test of refusals.
        if (name, conversation) != ("mistral", "system")
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_and_ids_equal_transformers(
    ours: dict[str, Tokenizer],
    oracles: dict[str, Any],
    name: str,
    conversation: str,
    *,
    add_generation_prompt: bool,
) -> None:
    messages = CONVERSATIONS[conversation]
    before = json.dumps(messages)
    text = ours[name].apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    assert text == oracles[name].apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    ids = ours[name].apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True
    )
    assert ids == (
        oracles[name].apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False
        )
    )
    assert json.dumps(messages) == before


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tools_equal_transformers(
    ours: dict[str, Tokenizer],
    oracles: dict[str, Any],
    name: str,
    tools: list[dict[str, Any]] | None,
) -> None:
    text = ours[name].apply_chat_template(TOOL_CALLS, tools=tools)
    assert text == oracles[name].apply_chat_template(
        TOOL_CALLS, tools=tools, add_generation_prompt=True, tokenize=False
    )
    if name == "qwen3" and tools:
        assert 'It\'s <now> & \\"here\\" — 世界' in text


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_template_variables_reach_the_template(
    ours: dict[str, Tokenizer], oracles: dict[str, Any], *, enable_thinking: bool
) -> None:
    text = ours["qwen3"].apply_chat_template([QUESTION], enable_thinking=enable_thinking)
    assert text == oracles["qwen3"].apply_chat_template(
        [QUESTION], enable_thinking=enable_thinking, add_generation_prompt=True, tokenize=False
    )
    assert ("<think>\n\n</think>" in text) is not enable_thinking


def test_documents_equal_transformers(ours: dict[str, Tokenizer], oracles: dict[str, Any]) -> None:
    documents = [{"title": "A", "text": "one"}, {"title": "B", "text": "two"}]
    for given in (documents, None):
        text = ours["documents"].apply_chat_template([QUESTION], documents=given)
        assert text == oracles["documents"].apply_chat_template(
            [QUESTION], documents=given, tokenize=False
        )


def test_date_equals_transformers(ours: dict[str, Tokenizer], oracles: dict[str, Any]) -> None:
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert f"Today Date: {today}" in ours["llama3"].apply_chat_template([QUESTION])
    fixed = ours["llama3"].apply_chat_template([QUESTION], date_string="01 Jan 2020")
    assert fixed == oracles["llama3"].apply_chat_template(
        [QUESTION], date_string="01 Jan 2020", add_generation_prompt=True, tokenize=False
    )


@pytest.mark.parametrize("name", ["qwen3", "llama3", "smollm2", "mistral", "parts"])
@pytest.mark.parametrize("start", ["The answer is", "The answer is  ", "8\n", " "])
def test_continuing_a_message_equals_transformers(
    ours: dict[str, Tokenizer], oracles: dict[str, Any], name: str, start: str
) -> None:
    messages = [QUESTION, {"role": "assistant", "content": start}]
    text = ours[name].apply_chat_template(messages, continue_final_message=True)
    assert text == oracles[name].apply_chat_template(
        messages, continue_final_message=True, tokenize=False
    )
    assert text.rstrip().endswith(start.rstrip())
    assert messages[1]["content"] == start


def test_continuing_the_last_text_part(ours: dict[str, Tokenizer], oracles: dict[str, Any]) -> None:
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [QUESTION, {"role": "assistant", "content": parts}]
    text = ours["parts"].apply_chat_template(messages, continue_final_message=True)
    assert text == oracles["parts"].apply_chat_template(
        messages, continue_final_message=True, tokenize=False
    )
    assert text.endswith("<text>one<text>two")


def test_chat_has_exactly_one_bos(ours: dict[str, Tokenizer]) -> None:
    tokenizer = ours["llama3"]
    ids = tokenizer.apply_chat_template([QUESTION], tokenize=True)
    assert ids.count(tokenizer.bos_token_id or -1) == 1
    text = tokenizer.apply_chat_template([QUESTION])
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text).count(tokenizer.bos_token_id or -1) == 2


def test_text_parts_are_joined_for_templates_that_print_contents(
    ours: dict[str, Tokenizer], oracles: dict[str, Any]
) -> None:
    parts: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}
    ]
    plain = [{"role": "user", "content": "a\nb"}]
    for name in ("qwen3", "llama3", "smollm2", "mistral"):
        assert ours[name].apply_chat_template(parts) == ours[name].apply_chat_template(plain)
    kept = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert ours["parts"].apply_chat_template(kept) == (
        oracles["parts"].apply_chat_template(kept, tokenize=False)
    )
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(
        RequestError, match=r"messages\[0\]\['content'\] has a part that is no text"
    ):
        ours["qwen3"].apply_chat_template(image)


@pytest.mark.parametrize(
    ("template", "reads_parts"),
    [
        ("{% for part in message['content'] %}{{ part }}{% endfor %}", True),
        ("{% for part in message.content | list %}{{ part }}{% endfor %}", True),
        ("{% set parts = message.content %}{% for p in parts %}{{ p.text }}{% endfor %}", True),
        ("{% macro f(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}", True),
        ("{% set words = message.content.split() %}{% for w in words %}{{ w }}{% endfor %}", False),
        ("{{ message.content }}", False),
    ],
)
def test_templates_that_read_parts_are_recognised(template: str, *, reads_parts: bool) -> None:
    body = (
        "{% for message in messages %}" + template + "{{ message.content is string }}{% endfor %}"
    )
    content = [{"type": "text", "text": "a"}]
    assert ("False" in render(body, {"role": "user", "content": content})) is reads_parts


def test_null_values_count_as_absent() -> None:
    body = "{{ messages[0].content is defined }} {{ 'tool_calls' in messages[0] }}"
    assert render(body, {"role": "a", "content": None, "tool_calls": None}) == "False False"


def silent_calls(**content: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a content, or none
    call = {key: value for key, value in TOOL_CALLS[1].items() if key != "content"}
    return [TOOL_CALLS[0], {**call, **content}, TOOL_CALLS[2]]


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_tool_calls_without_content_equal_transformers(
    ours: dict[str, Tokenizer], oracles: dict[str, Any], name: str, content: dict[str, Any]
) -> None:
    messages = silent_calls(**content)
    text = ours[name].apply_chat_template(messages, tools=TOOLS)
    assert "weather" in text
    assert text == oracles[name].apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_template_that_needs_a_content_gets_an_empty_one(
    ours: dict[str, Tokenizer], oracles: dict[str, Any], content: dict[str, Any]
) -> None:
    with pytest.raises(Exception, match="content"):
        oracles["smollm2"].apply_chat_template(silent_calls(**content), tokenize=False)
    messages = silent_calls(**content)
    assert ours["smollm2"].apply_chat_template(messages) == oracles["smollm2"].apply_chat_template(
        silent_calls(content=""), add_generation_prompt=True, tokenize=False
    )
    assert messages == silent_calls(**content)


def test_only_the_assistant_may_say_nothing(ours: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match=r"no attribute 'content' \(keys whose value is None"):
        ours["smollm2"].apply_chat_template([{"role": "user", "content": None}])
    with pytest.raises(RequestError, match="content"):
        ours["smollm2"].apply_chat_template([{"role": "user", "text": "hi"}])


def test_reasoning_goes_by_every_name() -> None:
    body = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    for name in ("reasoning", "reasoning_content", "thinking"):
        assert render(body, {"role": "assistant", name: "why"}) == "why why"


def test_objects_become_plain_data() -> None:
    class Role(str, enum.Enum):
        USER = "user"

    @dataclass
    class Call:
        name: str
        sizes: tuple[int, ...]

    class Model:
        def model_dump(self) -> dict[str, object]:
            return {"deep": Call("f", (1, 2))}

    body = "{{ messages[0] | tojson }}"
    rendered = render(body, {"role": Role.USER, "content": "x", "call": Model(), "n": 1.5})
    expected = {"role": "user", "content": "x", "call": {"deep": {"name": "f", "sizes": [1, 2]}}}
    assert json.loads(rendered) == {**expected, "n": 1.5}


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    for body in (
        "{{ messages.append({}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
    ):
        with pytest.raises(RequestError, match="refused"):
            render(body, {"role": "user", "content": "x"})
    with pytest.raises(RequestError, match=r"messages\[0\]\['content'\] is a PosixPath"):
        render("{{ messages[0].content.unlink() }}", {"role": "user", "content": tmp_path / "f"})


def test_refusals_are_errors_of_the_request(ours: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="refused them: Conversation roles must alternate"):
        ours["mistral"].apply_chat_template([SYSTEM, QUESTION])
    with pytest.raises(RequestError, match="failed on them with TypeError"):
        ours["smollm2"].apply_chat_template([{"role": "user", "content": 3}])
    with pytest.raises(RequestError, match="refused"):
        render("{{ messages[0].a.b }}", {"role": "user"})


@pytest.mark.parametrize(
    "name",
    ["return_tensors", "return_dict", "padding", "truncation", "max_length", "tokenizer_kwargs"],
)
def test_what_transformers_does_with_tokens_is_no_variable_of_a_template(
    ours: dict[str, Tokenizer], name: str
) -> None:
    refused: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=rf"tokenize=True.* no {name}=True"):
        ours["qwen3"].apply_chat_template([QUESTION], **refused)
    # What asks for nothing is what callers get anyway.
    assert ours["qwen3"].apply_chat_template([QUESTION], **{**refused, name: None})


def test_a_missing_template_is_a_clear_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer_from_directory(save_tokenizer("qwen", tmp_path))
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match=r"no chat template.*chat_template.*generate\(\)"):
        tokenizer.apply_chat_template([QUESTION])
    assert tokenizer.apply_chat_template([QUESTION], chat_template="own") == "own"


def test_named_templates_are_picked_as_transformers_picks_them() -> None:
    both = ChatTemplates({"default": "d", "tool_use": "t", "rag": "r"}, {})
    question = [QUESTION]
    assert both.render(question) == "d"
    assert both.render(question, tools=TOOLS) == "t"
    assert both.render(question, chat_template="rag", tools=TOOLS) == "r"
    with pytest.raises(RequestError, match=r"no default one.*\['a', 'b'\]"):
        ChatTemplates({"a": "1", "b": "2"}, {}).render(question)


def test_wrong_arguments_are_named(ours: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="messages is empty"):
        ours["qwen3"].apply_chat_template([])
    with pytest.raises(RequestError, match=r"messages must be a list of dicts.* got str"):
        ours["qwen3"].apply_chat_template("hi")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"messages\[0\] must be a dict.*got str"):
        ours["qwen3"].apply_chat_template(["hi"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="tools must be a list"):
        render("", QUESTION, tools={"a": 1})
    with pytest.raises(RequestError, match=r"tools\[0\] is a function"):
        render("", QUESTION, tools=[print_nothing])
    with pytest.raises(RequestError, match="exclude each other"):
        render("", QUESTION, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="no text content to carry on"):
        render("", {"role": "user"}, continue_final_message=True)
    with pytest.raises(RequestError, match="does not print the last message"):
        render("fixed", QUESTION, continue_final_message=True)
    with pytest.raises(ConfigError, match="line 2 is no valid Jinja"):
        render("\n{% if %}", QUESTION)


@pytest.mark.parametrize(
    "body",
    [
        "{{ '{0}'.format() }}",
        "{{ cycler().next() }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{% include 'other' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ strftime_now(5) }}",
        "{{ raise_exception(5) }}",
    ],
)
def test_whatever_a_template_does_is_an_error_of_the_request(body: str) -> None:
    with pytest.raises(RequestError, match=r"chat template (failed on|refused) them"):
        render(body, QUESTION)


def test_what_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RequestError, match="without end, or too deeply"):
        render("", {"role": "user", "content": endless})
    with pytest.raises(RequestError, match="without end, or too deeply"):
        render("", QUESTION, tools=[{"type": endless}])
    with pytest.raises(ConfigError, match="nested too deeply"):
        render("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", QUESTION)
    with pytest.raises(RequestError, match=r"chat_template must be .* got int"):
        ChatTemplates({}, {}).render([QUESTION], chat_template=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "variables",
    [{"tokenize": True}, {"messages": []}, {"padding": True}, {1: 2}, 5, "text", [1]],
    ids=repr,
)
def test_what_is_no_variable_of_a_template_is_refused(
    ours: dict[str, Tokenizer],
    variables: Any,  # noqa: ANN401 - whatever a caller may pass
) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs must be a dict of variables"):
        render_conversation(ours["qwen3"], [QUESTION], chat_template_kwargs=variables)


def test_template_variables_go_before_arguments_of_the_same_name(
    ours: dict[str, Tokenizer],
) -> None:
    """As in vLLM, whose clients pass some of them that way."""
    tokenizer = ours["qwen3"]
    without = render_conversation(tokenizer, [QUESTION], add_generation_prompt=False)
    assert without != render_conversation(tokenizer, [QUESTION])
    for name, value in (("add_generation_prompt", False), ("tools", None), ("chat_template", None)):
        given: dict[str, Any] = {"add_generation_prompt": False, name: "something else"}
        assert without == render_conversation(
            tokenizer, [QUESTION], **given, chat_template_kwargs={name: value}
        )


def print_nothing() -> None:
    """Stands for a callable where a JSON schema belongs."""


def test_templates_of_requests_do_not_pile_up() -> None:
    templates = ChatTemplates({}, {})
    for number in range(100):
        source = f"{{{{ {number} }}}}"
        assert templates.render([QUESTION], chat_template=source) == str(number)
    assert len(templates._compiled) <= 16
