"""Try the client packages of other projects on a server: `python tests/clients/check.py URL FOLDER`.

FOLDER has the tokenizer of the model.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import anthropic
import instructor
import litellm
import openai
from langchain_openai import ChatOpenAI
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from pydantic import BaseModel

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
QUESTION = [{"role": "user", "content": "How is the weather in Oslo?"}]


class City(BaseModel, extra="forbid"):  # a tiny model would add properties without end
    """What a constrained answer has."""

    large: bool


def check_openai(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="any")
    chat = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=100,
        tools=[{"type": "function", "function": FUNCTION}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert chat.choices[0].message.tool_calls[0].function.name == "weather"
    tool = {"type": "function", **FUNCTION}
    choice = {"type": "function", "name": "weather"}
    with client.responses.stream(model=model, input=QUESTION, tools=[tool], tool_choice=choice) as stream:
        stream.until_done()
        assert stream.get_final_response().output[-1].name == "weather"
    assert client.responses.parse(model=model, input="Oslo", text_format=City).output_parsed.large in (True, False)


def check_anthropic(url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="any")
    tool = {"name": "weather", "input_schema": SCHEMA}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {"model": model, "max_tokens": 100, "messages": QUESTION}
    with client.messages.stream(**body, tools=[tool], tool_choice=choice) as stream:
        answer = stream.get_final_message()
    call = answer.content[-1]
    assert call.input["city"] in SCHEMA["properties"]["city"]["enum"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**body | {"messages": turns}, tools=[tool]).usage.output_tokens
    assert client.messages.count_tokens(model=model, messages=QUESTION).input_tokens


def check_litellm(url: str, model: str) -> None:
    for name, base in (("openai/", url + "/v1"), ("anthropic/", url)):
        answer = litellm.completion(name + model, messages=QUESTION, api_base=base, api_key="any", max_tokens=8)
        assert answer.usage.completion_tokens


def check_langchain(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=url + "/v1", api_key="any", model=model, max_tokens=60, temperature=0)
    assert chat.bind_tools([FUNCTION], tool_choice="weather").invoke("Oslo?").tool_calls
    assert chat.with_structured_output(City, method="json_schema").invoke("Oslo?").large in (True, False)
    assert "".join(part.text for part in chat.stream("Oslo?"))


def check_instructor(url: str, model: str) -> None:
    openai_client = openai.OpenAI(base_url=url + "/v1", api_key="any")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client, mode=mode)
        assert client.chat.completions.create(model=model, messages=QUESTION, response_model=City, temperature=0)


def check_lm_eval(url: str, model: str) -> None:
    harness = LocalCompletionsAPI(base_url=url + "/v1/completions", model=model, tokenizer=sys.argv[2], max_length=256)
    texts = ("    return a + b", "    zzz qqq")
    requests = [Instance("loglikelihood", {}, ("def add(a, b):", text), i) for i, text in enumerate(texts)]
    likely, unlikely = harness.loglikelihood(requests)
    assert likely > unlikely


def check_guidellm(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prompts, report = Path(folder, "prompts.jsonl"), Path(folder, "report.json")
        lines = [json.dumps({"prompt": f"Count to {i}.", "output_tokens_count": 16}) for i in range(8)]
        prompts.write_text("\n".join(lines))
        options = {
            "backend": f"kind=openai_http,target={url}",
            "profile": "kind=concurrent,streams=2",
            "constraint": "kind=max_requests,count=8",
            "data": f"kind=json_file,path={prompts}",
            "tokenizer": f"kind=huggingface_auto,model={sys.argv[2]}",
            "output": f"kind=json,path={report}",
        }
        pairs = [part for name, value in options.items() for part in (f"--{name}", value)]
        command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-console", *pairs]
        subprocess.run(command, check=True, timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 8


def main() -> None:
    url = sys.argv[1].rstrip("/")
    model = openai.OpenAI(base_url=url + "/v1", api_key="any").models.list().data[0].id
    failures = 0
    checks = (
        check_openai,
        check_anthropic,
        check_litellm,
        check_langchain,
        check_instructor,
        check_lm_eval,
        check_guidellm,
    )
    for check in checks:
        try:
            check(url, model)
            print(f"{check.__name__}: passed")
        except Exception as error:
            failures += 1
            print(f"{check.__name__}: {type(error).__name__}: {error}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
