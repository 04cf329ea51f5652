"""The markers of function calls and reasoning. They are text, so that they can be found and forced."""

from collections.abc import Collection

CALL_START = "<tool_call>"  # this and the next: Hermes and Qwen
CALL_END = "</tool_call>"
CHANNEL = "<|channel|>"  # this and the next two: GPT-OSS
FINAL = f"{CHANNEL}final<|message|>"  # before the text of an answer
TURN = "<|start|>assistant"  # between the parts of an answer
THOUGHT_MARKERS = (  # before and after the reasoning of an answer
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]")
_DEEPSEEK = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
_LFM = ("<|tool_call_start|>", "<|tool_call_end|>")
_HARMONY = frozenset({CHANNEL, "<|start|>", "<|message|>", "<|constrain|>"})
_THOUGHT = frozenset(marker for pair in THOUGHT_MARKERS for marker in pair)
_MARKERS = frozenset({CALL_START, CALL_END, *_MISTRAL, *_LFM, *(f"<｜tool▁{name}｜>" for name in _DEEPSEEK)}) | _THOUGHT


def text_markers(tokens: Collection[str]) -> frozenset[str]:
    """Return the markers that are text in a tokenizer with these added tokens."""
    # Other models end a text with a marker of GPT-OSS.
    return _MARKERS | _HARMONY if CHANNEL in tokens else _MARKERS
