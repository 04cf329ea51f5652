"""Sample rollouts of a policy, swap its weights, and see which version sampled which token."""

import torch

from outrider import SamplingParams
from outrider.train.rl import RolloutEngine

engine = RolloutEngine.load("@nano", proposer="group", k=4, dtype="float32", max_model_len=128)
params = SamplingParams(temperature=1.0, max_tokens=16)
# Four samples of each prompt form a group. Log-probabilities belong to the policy, never to the draft.
batch = engine.generate(["def add(a, b):", "The old man"], params, n=4, seed=1)
for group in batch.groups():
    for rollout in group[:2]:
        print(f"{sum(rollout.logprobs):7.2f} {rollout.text!r}")
print(f"-- {batch.stats.tau:.2f} tokens per forward pass; {batch.provenance}")

# New weights arrive after four rounds of two rollouts. The rollouts go on with them. A trainer sends the `state_dict`
# of its policy. Here one tensor changes: the scale of the last norm.
engine.submit(["def add(a, b):"], SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True), n=2)
for _ in range(4):
    engine.step()
engine.update_weights({"model.norm.weight": torch.full((128,), 2.5)})
for rollout in engine.completed():
    print("versions by token:", rollout.token_versions())
