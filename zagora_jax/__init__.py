"""zagora-jax: fine-tune Llama-family models with 4-bit weights and LoRA on a few GPUs."""
