"""Read quantized Hugging Face checkpoints from safetensors."""
