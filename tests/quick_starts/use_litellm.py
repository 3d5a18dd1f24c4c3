"""LiteLLM's quick starts: completion, stream, tools, text completion."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network

import litellm

base = {"model": "openai/vkback", "api_base": os.environ["BASE_URL"], "api_key": "none"}
messages = [{"content": "Hello, how are you?", "role": "user"}]
assert litellm.completion(messages=messages, max_tokens=20, **base).choices[0].message.content
assert "".join(part.choices[0].delta.content or "" for part in litellm.completion(messages=messages, max_tokens=20, stream=True, **base))
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {
                "type": "object",
                "properties": {
                    "location": {"type": "string", "maxLength": 40},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["location"],
            },
        },
    }
]
reply = litellm.completion(
    messages=[{"role": "user", "content": "What's the weather like in Paris?"}],
    tools=tools,
    tool_choice={"type": "function", "function": {"name": "get_current_weather"}},
    max_tokens=150,
    **base,
)
(call,) = reply.choices[0].message.tool_calls
assert json.loads(call.function.arguments)["location"]
base["model"] = "text-completion-openai/vkback"
assert litellm.text_completion(prompt="The capital of France is", max_tokens=8, **base).choices[0].text
print("completion, stream, tools, text_completion")
