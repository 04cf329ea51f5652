"""The adapter for TRL: `GRPOTrainer` with the rollouts of Outrider, through TRL's `rollout_func`.

    engine = RolloutEngine.load(folder, proposer="suffix:100000")
    trainer = GRPOTrainer(model=folder, rollout_func=TRLRollouts(engine), ...)

TRL applies no importance weights to rollouts that do not come from vLLM: it takes them as samples of the current
policy. So the adapter accepts exact engines only, and loads the weights whenever the trainer has changed them.
"""

from collections.abc import Sequence
from typing import Any

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.train.rl.peft import merged_weights
from outrider.train.rl.records import RolloutBatch
from outrider.train.rl.rollout import RolloutEngine

_CALLS = 1 << 20  # calls of a step; a training step has one, an evaluation one per batch


class TRLRollouts:
    """Generates the completions of a `GRPOTrainer` of TRL (tested with 1.16).

    Prompts arrive repeated, once per completion. Conversations get the chat template of the
    engine's tokenizer. The sampling parameters are those of the trainer's arguments. The seed of a
    completion depends on the seed of the arguments, the step and the position in the batch.
    """

    def __init__(self, engine: RolloutEngine, *, statistics: bool = True) -> None:
        """Use an engine for the model that the trainer trains. The names of their weights must be the same.

        With `peft_config`, the engine gets the base model's weights with the LoRA adapter merged.

        Args:
            engine: a rollout engine with an exact verifier.
            statistics: pass `outrider_tau` (output tokens per pass of the target) of each completion to the reward
                functions, as TRL does with all further fields of a rollout.

        Raises:
            OutriderError: the engine's verifier is lossy.
        """
        if not engine.provenance.exact:
            raise OutriderError(
                f"verifier {engine.provenance.verifier} is lossy, and TRL does not correct for it; use an exact one"
            )
        self.engine = engine
        self.last: RolloutBatch | None = None  # the rollouts of the last call, for logs
        self._statistics = statistics
        self._loaded_step: int | None = None  # of the trainer
        self._calls = 0  # since the weights were loaded

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return the completions of prompts, in the form that TRL asks for.

        Raises:
            OutriderError: the trainer has an option that the engine does not support.
        """
        self._load_weights(trainer)
        args = trainer.args
        params = _sampling_params(args)
        tokens = [self._encode(prompt, args) for prompt in prompts]
        process = int(trainer.accelerator.process_index)
        step = derive_seed(derive_seed(int(args.seed), 1 + int(trainer.state.global_step)), 1 + process)
        batch = self.last = self.engine.generate(tokens, params, seed=derive_seed(step, 1 + self._calls))
        self._calls = (self._calls + 1) % _CALLS
        # TRL looks at the last token of each completion, so that a failed one needs a token, too.
        end = trainer.processing_class.eos_token_id
        rows: list[tuple[tuple[int, ...], tuple[float, ...], int]] = []  # 1: the loss uses the tokens
        for rollout in batch.rollouts:
            failed = rollout.error or not rollout.token_ids
            rows.append(((end,), (0.0,), 0) if failed else (rollout.token_ids, rollout.sampled_logprobs, 1))
        out: dict[str, Any] = {
            "prompt_ids": [list(rollout.prompt_token_ids) for rollout in batch.rollouts],
            "completion_ids": [list(ids) for ids, _, _ in rows],
            "logprobs": [list(logprobs) for _, logprobs, _ in rows],
        }
        if not all(used for _, _, used in rows):  # the loss leaves out tokens with mask 0
            out["env_mask"] = [[used] * len(ids) for ids, _, used in rows]
        if self._statistics:
            out["outrider_tau"] = [rollout.stats.tau for rollout in batch.rollouts]
        return out

    def _load_weights(self, trainer: Any) -> None:
        """Give the trainer's weights to the engine, if they have changed."""
        step = int(trainer.state.global_step)
        if step == self._loaded_step:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.engine.update_weights(merged_weights(model))
        self._loaded_step = step
        self._calls = 0

    def _encode(self, prompt: Any, args: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self.engine.llm.encode(prompt)
        if getattr(args, "chat_template_kwargs", None):
            raise OutriderError("chat_template_kwargs is set, which Outrider does not support; give prompts as text")
        if any(not isinstance(message.get("content"), str) for message in prompt):
            raise OutriderError("a message has content that is no text; Outrider generates from text only")
        return self.engine.llm.encode_chat(prompt)


def _sampling_params(args: Any) -> SamplingParams:
    """Return the sampling parameters of a trainer's arguments."""
    if getattr(args, "generation_kwargs", None):
        raise OutriderError("generation_kwargs is set, which Outrider does not read; use the trainer's own arguments")
    if getattr(args, "use_vllm", False):
        raise OutriderError("use_vllm is set, and the rollouts come from Outrider; leave it out")
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=max(args.top_k or 0, 0),
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        max_tokens=args.max_completion_length,
    )
