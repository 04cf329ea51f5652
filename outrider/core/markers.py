"""The markers of function calls, in the format of Hermes and Qwen models."""

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
