"""Text in, packed token sequences out, addressed by global sample position."""
