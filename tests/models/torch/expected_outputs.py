"""What an encoder-decoder model of transformers gives for a source."""

from itertools import product

import torch

from outrider.core.params import SamplingParams
from outrider.lab.audit.statistics import g_test


def expected_logits(model, source, tokens):
    """Return the logits [V] after `tokens` in a fresh pass."""
    sources, outputs = torch.tensor([source]), torch.tensor([tokens])
    masks = {"attention_mask": torch.ones_like(sources), "decoder_attention_mask": torch.ones_like(outputs)}
    return model(input_ids=sources, decoder_input_ids=outputs, use_cache=False, **masks).logits[0, -1]


def three_token_probs(model, source):
    """Return the probability of each output of three tokens, at temperature 2 and with the two likeliest tokens."""
    probs = {}
    with torch.inference_mode():
        for ranks in product(range(2), repeat=3):
            tokens, prob = [0], 1.0
            for rank in ranks:
                top = (expected_logits(model, source, tokens) / 2).topk(2)
                prob *= float(top.values.softmax(-1)[rank])
                tokens.append(int(top.indices[rank]))
            probs[tuple(tokens[1:])] = prob
    return probs


def check_three_tokens(llm, source, probs):
    """Check that sampled outputs of three tokens have these probabilities, with drafts."""
    params = SamplingParams(max_tokens=3, temperature=2.0, top_k=2, n=600, seed=1, ignore_eos=True)
    outputs = [completion.token_ids for completion in llm.generate(sources=source, params=params)]
    counts = [outputs.count(tokens) for tokens in probs]
    assert sum(counts) == len(outputs)
    assert g_test(counts, list(probs.values())).p_value > 1e-3
    assert llm.stats.draft_tokens > 0
