"""A mixture of experts made from a dense Llama model: its MLPs become routed experts (sparse upcycling)."""
