"""What a run leaves behind in forms that other programs read: models for `transformers` and vLLM, adapters for peft."""
