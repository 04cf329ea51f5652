"""Log-probabilities of answers with a shared prompt, against one pass over each whole sequence."""

import random
from types import SimpleNamespace

import pytest
import torch

from outrider.train.rl.answers import answer_logprobs, split_answers
from tests.helpers import tiny
from tests.helpers.architectures import ARCHITECTURES, WINDOW

CPU = torch.device("cpu")
TEMPERATURE = 0.7
CHANCE = random.Random(0)
PROMPTS = [tiny.text(CHANCE, length) for length in (WINDOW + 9, 1, 2)]


def rollout(prompt, length):
    return SimpleNamespace(
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(tiny.text(CHANCE, length)),
        sampled_logprobs=tuple(-CHANCE.random() for _ in range(length)),
    )


ROLLOUTS = [rollout(prompt, length) for length in (5, 1, 8) for prompt in PROMPTS]


def model_of(name):
    torch.manual_seed(0)
    config = ARCHITECTURES[name]()
    model = tiny.auto_class(config).from_config(config).float().eval()
    model.set_attn_implementation("eager" if name in ("gemma2", "gpt_oss") else "sdpa")
    return model


def whole(model, rollout):
    """The log-probabilities of the tokens of an answer, with one pass over the sequence and all its logits."""
    tokens = torch.tensor([rollout.prompt_token_ids + rollout.token_ids])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(rollout.prompt_token_ids) - 1 : -1]
    return (logits.float() / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


def gradients(model):
    found = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.fast_cases("llama-True", "gemma2-True", "gpt_oss-True", "llama-False")
@pytest.mark.parametrize(
    ("name", "share_prompt"),
    [
        *((name, True) for name in ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "bloom")),
        *((name, False) for name in ("llama", "qwen3_5")),
    ],
)
def test_values_and_gradients_are_those_of_whole_sequences(name, share_prompt):
    model = model_of(name)
    for each in ROLLOUTS:
        whole(model, each).sum().backward()
    expected = gradients(model)
    for answers in split_answers(ROLLOUTS, [1.0] * len(ROLLOUTS), 2, CPU):
        logprobs = answer_logprobs(model, answers, temperature=TEMPERATURE, share_prompt=share_prompt)
        logprobs.sum().backward()
        for row, each in zip(logprobs.detach(), answers.rollouts, strict=True):
            length = len(each.token_ids)
            assert torch.allclose(row[:length], whole(model, each).detach(), atol=1e-4)
            assert not row[length:].any()
    for one, two in zip(gradients(model), expected, strict=True):
        assert torch.allclose(one, two, atol=1e-4 * float(two.abs().max()) + 1e-6)


def test_the_prompt_is_computed_once_and_logits_for_answers_only():
    model = model_of("llama")
    counts = {"tokens": 0, "logits": 0}

    def count(what):
        def hook(_module, _inputs, output):
            counts[what] += output.shape[0] * output.shape[1]

        return hook

    model.get_input_embeddings().register_forward_hook(count("tokens"))
    model.get_output_embeddings().register_forward_hook(count("logits"))
    (answers,) = split_answers([each for each in ROLLOUTS if len(each.prompt_token_ids) > 2], [1.0] * 3, 8, CPU)
    answer_logprobs(model, answers, temperature=1.0, share_prompt=True)
    assert counts["tokens"] == len(PROMPTS[0]) - 1 + 3 * 8
    assert counts["logits"] == 1 + 3 * 8


def test_splitting():
    parts = split_answers(ROLLOUTS, list(map(float, range(len(ROLLOUTS)))), 2, CPU)
    assert [tuple(part.prompt.tolist()) for part in parts[::2]] == [tuple(prompt) for prompt in PROMPTS]
    assert [[len(each.token_ids) for each in part.rollouts] for part in parts] == [[1, 5], [8]] * 3
    for part in parts:
        for b, each in enumerate(part.rollouts):
            assert part.advantages[b, 0] == ROLLOUTS.index(each)
            assert part.tokens[b][part.mask[b]].tolist() == list(each.token_ids)
            assert torch.equal(part.sampled_logprobs[b][part.mask[b]], torch.tensor(each.sampled_logprobs))
        assert not part.sampled_logprobs[~part.mask].any()
