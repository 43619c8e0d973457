"""Write artifacts that other programs read: models for `transformers` and vLLM, adapters for peft."""
