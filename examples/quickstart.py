"""Complete two prompts with the embedded models and print what speculation did."""

from outrider import LLM, SamplingParams

llm = LLM(k=4)  # 4 draft tokens per round; for your own models: LLM("path/to/target", proposer="draft:path/to/draft")
question = llm.encode_chat([{"role": "user", "content": "Tom has 12 apples and buys 30 more. How many does he have?"}])
code = "<|endoftext|>def fibonacci(n):\n"  # the embedded models start each document with this token

for completion in llm.generate([question, code], SamplingParams(max_tokens=64)):
    print(completion.text)
    print(f"-- {completion.finish_reason}, {completion.stats.tau:.1f} tokens per forward pass of the target\n")
