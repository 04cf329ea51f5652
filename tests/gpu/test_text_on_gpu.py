"""Texts of the embedded models on a GPU: those of plain decoding, and of the CPU."""

import pytest

from outrider import LLM, OutriderError, SamplingParams
from tests.helpers.heads import write_new_head

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 256}
PROMPTS = [
    "<|endoftext|>import os\nimport sys\n\n\ndef main():\n    parser =",
    "Mia reads 8 pages every day. How many pages does Mia read in 5 days?",
    "the cat sat on the mat. the cat sat on the mat. the cat",
]
PROPOSERS = [
    "draft:@nano",
    "tree:@nano",
    "cascade:@nano",
    "draft:@eagle31",
    "tree:@eagle31",
    "draft:@mtp",
    "ngram",
    "suffix",
    "suffix:100000",
    "group",
    "recycle",
    "lookahead",
    "exit:4",
    "best(suffix,draft:@nano)",
    "merge(suffix,recycle)",
    "first(ngram,draft:@nano)",
    "switch(ngram,draft:@nano)",
]
PARAMS = {
    "greedy": SamplingParams(max_tokens=48),
    "sampled": SamplingParams(temperature=1.0, top_p=0.9, top_k=40, repetition_penalty=1.1, max_tokens=48, seed=3),
}


def texts(device, params, **settings):
    llm = LLM(device=device, **SETTINGS, **settings)
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module", params=PARAMS)
def params(request):
    return PARAMS[request.param]


@pytest.fixture(scope="module")
def plain(params):
    return texts("cuda", params, proposer="none")


def test_plain_text_is_that_of_the_cpu(params, plain):
    assert texts("cpu", params, proposer="none", kernels="torch") == plain


@pytest.mark.parametrize("k", [4, "auto"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_greedy_text_is_that_of_plain_decoding(proposer, k):
    params = PARAMS["greedy"]
    assert texts("cuda", params, proposer=proposer, k=k) == texts("cuda", params, proposer="none")


@pytest.mark.parametrize("k", [4, "auto"])
@pytest.mark.parametrize("form", ["draft", "tree"])
def test_text_with_a_medusa_head_is_that_of_plain_decoding(form, k, tmp_path):
    head = write_new_head(tmp_path / "head", "medusa")
    params = PARAMS["greedy"]
    assert texts("cuda", params, proposer=f"{form}:{head}", k=k) == texts("cuda", params, proposer="none")


@pytest.mark.parametrize("proposer", ["draft:@nano", "tree:@nano", "tree:@eagle31", "merge(suffix,recycle)"])
def test_sampled_text_is_that_of_the_cpu(proposer):
    params = PARAMS["sampled"]
    assert texts("cuda", params, proposer=proposer, k=4) == texts(
        "cpu", params, proposer=proposer, k=4, kernels="torch"
    )


def test_default_proposer_of_a_target_without_draft():
    params = PARAMS["greedy"]
    assert texts("cuda", params, target="@nano") == texts("cuda", params, target="@nano", proposer="none")


def test_quantization_of_a_draft_is_refused():
    with pytest.raises(OutriderError, match="use device cpu"):
        LLM(device="cuda", draft_quantize="int8")
