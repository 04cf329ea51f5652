"""Print a completion while it is generated, and count the accepted draft tokens."""

from outrider import LLM, SamplingParams

llm = LLM()
accepted = 0
for chunk in llm.stream("<|endoftext|>def fibonacci(n):\n", SamplingParams(temperature=0.8, seed=7, max_tokens=48)):
    print(chunk.text, end="", flush=True)
    accepted += sum(chunk.from_draft)
    if chunk.completion is not None:
        print(f"\n-- {accepted} of {len(chunk.completion.token_ids)} tokens come from the draft model")
