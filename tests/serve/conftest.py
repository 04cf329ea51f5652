"""Servers and the model that they serve. Each test module has its own."""

import openai
import pytest

from outrider.llm import LLM
from tests.helpers.serving import OPTIONS, SWITCH_OPTIONS, serving


@pytest.fixture(scope="module")
def server():
    with serving() as (url, async_llm):
        yield url, async_llm


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server[0] + "/v1", api_key="any", max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture(scope="module")
def reference_llm():
    """An `LLM` with the options of the server, without a server."""
    return LLM(**OPTIONS, max_num_seqs=4)


@pytest.fixture(scope="module")
def switching_server():
    """The URL of the completions of a server whose requests choose between two proposers, and its `AsyncLLM`."""
    with serving(SWITCH_OPTIONS) as (url, async_llm):
        yield url + "/v1/completions", async_llm
