"""Turn text and records into packed token sequences that are addressed by global sample position."""
