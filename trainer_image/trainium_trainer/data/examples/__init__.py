"""Examples with prompt and answer, built from records: every `data.format` except Text."""
