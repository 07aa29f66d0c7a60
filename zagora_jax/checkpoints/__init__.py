"""Model files in and out, a tensor at a time: Hugging Face, GGUF, PEFT, Orbax."""
