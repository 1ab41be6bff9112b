"""Chat templates as well-known models have them, shortened: what templates in the wild do, and what a hostile one could do."""

CHATML = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}\
{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA_3 = """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA_3_1 = """\
{{- bos_token }}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
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
{#- The system message comes first. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have access to the following functions." }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
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

QWEN_2_5 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""  # noqa: E501

QWEN_3 = """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

UNCOMMON = """\
  {% for message in messages %}
    {% if loop.index > 3 %}
      {% break %}
    {% endif %}
    {% if message.role == 'tool' %}
      {% continue %}
    {% endif %}
    {% generation %}
{% set said = message.content %}{{ said|upper }} {{ {'b': [message, none, 1.5], 'a': '<é>'}|tojson }}
    {% endgeneration %}
{{ said is defined }}{{ message|tojson(ensure_ascii=True, indent=2, sort_keys=True, separators=(',', ': ')) }}
  {% endfor %}
{% set ns = namespace(self=1, dict={'x': 2}) %}{% set ns.count = messages|length %}{{ ns.count }}{{ ns.self }}{{ ns.dict.x }}
{{ dict(a=1, b=documents) }}{{ dict.fromkeys('ab', 0) }}{{ pad_token }}{{ tools is none }}{{ nothing }}{{ range(3)|list }}
{% macro shout(text, mark='!') %}{{ text ~ mark }}{% endmacro %}{{ shout(messages[-1].content) }}{{ messages|map(attribute='role')|join(',') }}
{% macro wrap() %}[{{ caller() }}]{% endmacro %}{% call wrap() %}x{% endcall %}{{ messages[0].name or 'nobody' }}{# a comment #}

"""  # noqa: E501
"""The corners: loop controls, {% generation %}, tojson's arguments, namespaces, dict, macros, white space."""

WELL_KNOWN = {
    "ChatML": CHATML,
    "Llama 2": LLAMA_2,
    "Llama 3": LLAMA_3,
    "Llama 3.1": LLAMA_3_1,
    "Qwen 2.5": QWEN_2_5,
    "Qwen 3": QWEN_3,
    "uncommon": UNCOMMON,
}

ATTACKS = {
    "the interpreter": "{{ ''.__class__.__mro__ }}",
    "the interpreter by a filter": "{{ (messages|attr('__class__')).__mro__ }}",
    "the interpreter by a format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "a changed list": "{{ messages.append(1) }}",
    "a changed dictionary": "{{ dict.update(messages[0], {'a': 1}) }}",
    "a hidden attribute": "{% set ns = namespace(_x=1) %}",
    "another hidden attribute": "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
    "a file": "{% include '/etc/passwd' %}",
    "half a character": r"{{ '\ud800' }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "much text": "{% for a in range(99999) %}{% for b in range(99999) %}some text{% endfor %}{% endfor %}",
    "a long string": "{{ messages[0].content * 30000000 }}",
    "a huge string": "{{ messages[0].content * 30000000000 }}",
    "a wide number": "{{ '%1000000000d' % (messages|length) }}",
    "a doubling string": "{% set ns = namespace(x='a') %}{% for a in range(60) %}{% set ns.x = ns.x * 2 %}{% endfor %}{{ ns.x }}",
    "a doubling list": "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "a large number": "{{ (8 + messages|length) ** (9 ** 9) }}",
    "an endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a deep list": "{% set ns = namespace(x=[]) %}{% for a in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "a long message": "{{ raise_exception('x' * 1000000) }}",
}
"""Each must be refused without affecting other conversations."""
