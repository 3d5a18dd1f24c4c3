"""instructor's quick start in its default mode (a tool), and by JSON schema."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=os.environ["BASE_URL"], api_key="none"), mode=mode)
    person = client.chat.completions.create(
        model="vkback",
        response_model=Person,
        messages=[{"role": "user", "content": "Extract: John is 25 years old"}],
        max_tokens=120,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(person, Person)
    print(mode, person)
