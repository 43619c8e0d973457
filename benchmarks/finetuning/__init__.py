"""LoRA beside full fine-tuning, and beside peft with `transformers.Trainer`: `python -m benchmarks.finetuning`."""
