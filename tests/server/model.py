"""A tiny model with a chat template, whose answers are letters."""

from pathlib import Path

import torch
from transformers import MixtralForCausalLM

from tests.train.finetune.tiny import END, make_tokenizer, mixtral_config

TEMPLATE = """\
{%- if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Call them with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- if shout %}SHOUT
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def save_model(folder: Path) -> Path:
    """Weights are large enough that tokens vary. Printable ones are likelier than all others, and
    the end of a text is not likely."""
    torch.manual_seed(5)
    model = MixtralForCausalLM(mixtral_config(initializer_range=0.7, max_position_embeddings=512))
    tokenizer = make_tokenizer(TEMPLATE)
    printable = [tokenizer.encode(chr(code))[0] for code in range(32, 127)]
    with torch.no_grad():
        others = torch.ones(model.config.vocab_size, dtype=torch.bool)
        others[printable] = False
        model.lm_head.weight[others] = 0
        model.lm_head.weight[END] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
