"""pydantic-ai's quick starts: text, an output type (a tool by default), a tool of its own."""

import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("vkback", provider=OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none"))
settings = {"max_tokens": 40, "temperature": 0.0}
agent = Agent(model, instructions="Be concise, reply with one sentence.", model_settings=settings)
assert agent.run_sync('Where does "hello world" come from?').output
print("text")


class CityLocation(BaseModel):
    city: str = Field(max_length=30)
    country: str = Field(max_length=30)


agent = Agent(model, output_type=CityLocation, model_settings={**settings, "max_tokens": 200, "parallel_tool_calls": False})
found = agent.run_sync("Where were the olympics held in 2012?")
assert isinstance(found.output, CityLocation)
print("output_type", found.output)

rolled = []
dice = Agent(model, instructions="You're a dice game.", model_settings=settings)


@dice.tool_plain
def roll_dice() -> str:
    """Roll a six-sided die and return the result."""
    rolled.append(4)
    return "4"


assert isinstance(dice.run_sync("My guess is 4").output, str)
print("a tool", "that was called" if rolled else "that it did not need")
