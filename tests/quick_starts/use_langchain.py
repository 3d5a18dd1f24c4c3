"""LangChain's quick starts with langchain-openai: invoke, stream, tools, structured output by a tool and by a schema."""

import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

llm = ChatOpenAI(model="vkback", base_url=os.environ["BASE_URL"], api_key="none", max_tokens=60, temperature=0)
messages = [("system", "You are a helpful assistant that translates English to French."), ("human", "I love programming.")]
assert llm.invoke(messages).content
assert "".join(chunk.content for chunk in llm.stream(messages))
assert len(llm.batch(["Say one.", "Say two."])) == 2
print("invoke, stream, batch")


class GetWeather(BaseModel):
    """Get the current weather in a given location"""

    location: str = Field(description="The city and state, e.g. San Francisco, CA", max_length=40)


bound = llm.bind_tools([GetWeather], tool_choice="GetWeather")
(call,) = bound.invoke("what is the weather like in San Francisco").tool_calls
assert call["name"] == "GetWeather" and call["args"]["location"]
print("bind_tools", call["args"])


@tool
def multiply(a: int, b: int) -> int:
    """Multiply a and b."""
    return a * b


reply = llm.bind_tools([multiply], tool_choice="any").invoke("What is 3 times 12?")
results = [multiply.invoke(each) for each in reply.tool_calls]
assert results, reply
answer = llm.bind_tools([multiply]).invoke([("human", "What is 3 times 12?"), reply, *results])
assert answer.content or answer.tool_calls
print("a round of tools", [result.content for result in results])


class Joke(BaseModel):
    """Joke to tell user."""

    setup: str = Field(description="The setup of the joke", max_length=80)
    punchline: str = Field(description="The punchline to the joke", max_length=80)


for method in ("function_calling", "json_schema"):
    longer = ChatOpenAI(model="vkback", base_url=os.environ["BASE_URL"], api_key="none", max_tokens=300, temperature=0)
    assert isinstance(longer.with_structured_output(Joke, method=method).invoke("Tell me a joke about cats"), Joke)
    print("structured output", method)
