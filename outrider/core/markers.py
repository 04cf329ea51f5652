"""The markers of function calls. They are text in every tokenizer, so that calls can be found and forced."""

CALL_START = "<tool_call>"  # this and the next: Hermes and Qwen
CALL_END = "</tool_call>"
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]")
_DEEPSEEK = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
TEXT_MARKERS = frozenset({CALL_START, CALL_END, *_MISTRAL, *(f"<｜tool▁{name}｜>" for name in _DEEPSEEK)})
