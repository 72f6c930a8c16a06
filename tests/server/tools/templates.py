"""Small chat templates, written for these tests, with the markup of families that have call formats of their own.

The real ones are not in the repository; `test_real_templates.py` reads them from a folder.
"""

from __future__ import annotations

_CHATML_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
_PLAIN = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"

GRANITE3 = """\
{%- if tools and not available_tools %}{% set available_tools = tools %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>Reply to calls with <|tool_call|> and a list.<|end_of_text|>' }}
{%- if available_tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + available_tools | tojson }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

PHI4_MINI = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- if message['role'] == 'system' and message['tools'] %}
        {{- '<|tool|>' + message['tools'] + '<|/tool|>' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""

FUNCTOOLS = (
    """\
{{- '<|im_start|>system\\nPrefix calls with functools, as functools[{"name": ...}].\\n' }}
{%- if tools %}{{- tools | tojson }}{% endif %}{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- if message.tool_calls %}{{- 'functools[' }}{% for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
        {{- ', ' if not loop.last }}
    {%- endfor %}{{- ']' }}{% endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}"""
    + _CHATML_END
)

OLMO3 = (
    """\
{{- '<|im_start|>system\\n<functions>' }}
{%- if tools is not none %}{{- tools | tojson }}{% endif %}{{- '</functions><|im_end|>\\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' + ('environment' if message.role == 'tool' else message.role) + '\\n' + message.content }}
    {%- if message.tool_calls %}{{- '<function_calls>' }}
        {%- for call in message.tool_calls %}{{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- key + '=' + value | tojson }}{{- ', ' if not loop.last }}
            {%- endfor %}{{- ')' }}{{- '\\n' if not loop.last }}
        {%- endfor %}{{- '</function_calls>' }}
    {%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}"""
    + _CHATML_END
)

LFM2 = (
    """\
{%- if tools %}{{- '<|im_start|>system\\nList of tools: <|tool_list_start|>' + tools | tojson }}
{{- '<|tool_list_end|><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}"""
    + _PLAIN
    + "{% endfor %}"
    + _CHATML_END
)

SMOLLM3 = (
    """\
{%- if xml_tools %}{{- '<|im_start|>system\\nAnswer with a JSON object in <tool_call></tool_call>.\\n' }}
    {%- for tool in xml_tools[:] %}{{- tool | string + '\\n' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- if python_tools %}{{- '<|im_start|>system\\nAnswer with Python between <code> and </code>.\\n' }}
    {%- for tool in python_tools[:] %}{{- tool | string + '\\n' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}"""
    + _PLAIN.replace("message.role", "('user' if message.role == 'tool' else message.role)")
    + "{% endfor %}"
    + _CHATML_END
)

QWEN3_CODER = (
    """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '\\nAnswer with <tool_call>\\n<function=name>' }}
    {{- '\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}{{- '</function>\\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}"""
    + _CHATML_END
)

FUNCTION_GEMMA = """\
{%- macro literal(value) -%}
    {%- if value is string -%}{{- '<escape>' + value + '<escape>' -}}
    {%- elif value is mapping -%}{%- set all = namespace(text=[]) -%}
        {%- for key in value -%}{%- set all.text = all.text + [key + ':' + literal(value[key])] -%}{%- endfor -%}
        {{- '{' + all.text | join(',') + '}' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is iterable -%}{%- set all = namespace(text=[]) -%}
        {%- for item in value -%}{%- set all.text = all.text + [literal(item)] -%}{%- endfor -%}
        {{- '[' + all.text | join(',') + ']' -}}
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- if tools %}{{- '<start_of_turn>developer\\n' }}
    {%- for tool in tools %}
        {{- '<start_function_declaration>declaration:' + literal(tool.function) + '<end_function_declaration>' }}
    {%- endfor %}{{- '<end_of_turn>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if not message.name %}{{- raise_exception('a result needs the name of its function') }}{% endif %}
        {{- '<start_function_response>response:' + message.name + '{value:' + literal(message.content) + '}' }}
        {{- '<end_function_response>' }}
    {%- else %}
        {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<start_function_call>call:' + call.function.name + literal(call.function.arguments) }}
            {{- '<end_function_call>' }}
        {%- endfor %}{{- '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""

GEMMA4 = (
    FUNCTION_GEMMA.replace("<escape>", '<|"|>')
    .replace("<start_function_call>", "<|tool_call>")
    .replace("<end_function_call>", "<tool_call|>")
    .replace("<start_function_", "<|tool_")
    .replace("<end_function_", "<tool_end_")
)

TEMPLATES = {
    "granite 3": GRANITE3,
    "phi-4-mini": PHI4_MINI,
    "functools": FUNCTOOLS,
    "olmo 3": OLMO3,
    "lfm2": LFM2,
    "smollm3": SMOLLM3,
    "qwen3 coder": QWEN3_CODER,
    "function gemma": FUNCTION_GEMMA,
    "gemma 4": GEMMA4,
}
"""By family."""

MARKERS = (
    "<|tool_call|>", "<|/tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>", "<start_function_call>",
    "<end_function_call>", "<escape>", "<start_function_response>", "<|tool_call>", "<tool_call|>", '<|"|>',
    "<|tool_response>",
)  # fmt: skip
"""Special tokens of these families."""
