"""Triton kernels for NVIDIA GPUs with a paged KV cache. Nothing else imports Triton at its top."""
