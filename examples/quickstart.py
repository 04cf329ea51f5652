"""Complete two prompts with the embedded pair, and see what speculation did."""

from outrider import LLM, SamplingParams

llm = LLM(k=4)  # LLM("path/to/target", proposer="draft:path/to/draft") for models of your own
question = llm.encode_chat([{"role": "user", "content": "Tom has 12 apples and buys 30 more. How many does he have?"}])
code = "<|endoftext|>def fibonacci(n):\n"

for completion in llm.generate([question, code], SamplingParams(max_tokens=64)):
    print(completion.text)
    print(f"-- {completion.finish_reason}, {completion.stats.tau:.1f} tokens a target pass\n")

for chunk in llm.stream(code, SamplingParams(temperature=0.8, seed=7, max_tokens=32)):
    print(chunk.text, end="", flush=True)
print()
