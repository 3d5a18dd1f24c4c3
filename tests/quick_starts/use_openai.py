"""The quick starts of openai-python: chat, completions, tools, responses, structured output, streams. Run by tests/quick_starts.py."""

import json
import os

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=os.environ["BASE_URL"], api_key="none")
model = client.models.list().data[0].id

# chat
completion = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "developer", "content": "Talk like a pirate."},
        {"role": "user", "content": "How do I check if a Python object is an instance of a class?"},
    ],
    max_tokens=40,
)
assert completion.choices[0].message.content
print("chat", repr(completion.choices[0].message.content[:60]))

# the next turn, with the reply as it came
messages = [{"role": "user", "content": "What is the capital of France?"}]
first = client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0)
again = client.chat.completions.create(
    model=model, messages=[*messages, first.choices[0].message, {"role": "user", "content": "And of Italy?"}], max_tokens=20, temperature=0
)
assert first.choices[0].message.content
assert again.choices[0].message.content
print("next turn", repr(again.choices[0].message.content))

# stream
stream = client.chat.completions.create(model=model, messages=messages, max_tokens=20, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
print("stream")

# completions
text = client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, temperature=0).choices[0].text
assert "Paris" in text, text
print("completions", repr(text))

# tools
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get current temperature for a given location.",
            "parameters": {
                "type": "object",
                "properties": {"location": {"type": "string", "description": "City and country e.g. Bogotá, Colombia", "maxLength": 40}},
                "required": ["location"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
asked = [{"role": "user", "content": "What is the weather like in Paris today?"}]
completion = client.chat.completions.create(model=model, messages=asked, tools=tools, max_tokens=60)
assert completion.choices[0].finish_reason in ("stop", "tool_calls", "length")
named = {"type": "function", "function": {"name": "get_weather"}}
completion = client.chat.completions.create(model=model, messages=asked, tools=tools, tool_choice=named, max_tokens=100)
(call,) = completion.choices[0].message.tool_calls
assert json.loads(call.function.arguments)["location"]
result = {"role": "tool", "tool_call_id": call.id, "content": "15 °C"}
final = client.chat.completions.create(model=model, messages=[*asked, completion.choices[0].message, result], tools=tools, max_tokens=40)
assert final.choices[0].message.content or final.choices[0].message.tool_calls
print("tools", call.function.arguments)


# structured output
class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


parsed = client.chat.completions.parse(
    model=model,
    messages=[
        {"role": "system", "content": "Extract the event information."},
        {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
    ],
    response_format=CalendarEvent,
    max_tokens=200,
    temperature=0,
)
assert isinstance(parsed.choices[0].message.parsed, CalendarEvent)
print("structured output", parsed.choices[0].message.parsed)

# responses
response = client.responses.create(
    model=model, instructions="You are a coding assistant that talks like a pirate.", input="How are you?", max_output_tokens=30
)
assert response.output_text
follow = client.responses.create(model=model, input="Why?", previous_response_id=response.id, max_output_tokens=20)
assert follow.output_text
kinds = [event.type for event in client.responses.create(model=model, input="Say hello.", max_output_tokens=12, stream=True)]
assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
print("responses", repr(response.output_text[:60]))
