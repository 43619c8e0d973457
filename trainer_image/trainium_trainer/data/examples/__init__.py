"""Examples of prompt and answer, made from records: `data.format` other than Text."""
