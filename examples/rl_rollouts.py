"""Sample rollouts of a policy, swap its weights, and see which version sampled which token."""

import torch

from outrider import SamplingParams
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.train.rl import RolloutEngine

engine = RolloutEngine.load(embedded("nano"), proposer="group", k=4, dtype="float32", max_model_len=128)
params = SamplingParams(temperature=1.0, max_tokens=16)
# Four samples of each prompt form a group. Log-probabilities belong to the policy, never to the draft.
batch = engine.generate(["def add(a, b):", "The old man"], params, n=4, seed=1)
for group in batch.groups():
    for rollout in group[:2]:
        print(f"{sum(rollout.logprobs):7.2f} {rollout.text!r}")
print(f"-- {batch.stats.tau:.2f} tokens per forward pass; {batch.provenance}")

# New weights arrive after four rounds of two rollouts. The rollouts go on with them.
weights = load_checkpoint(embedded("nano"), dtype="float32").model.state_dict()
engine.submit(["def add(a, b):"], SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True), n=2)
for _ in range(4):
    engine.step()
mlp = {name: value for name, value in weights.items() if "mlp" in name}
engine.update_weights({name: value + 0.01 * torch.randn_like(value) for name, value in mlp.items()})
for rollout in engine.completed():
    print("versions by token:", rollout.token_versions())
