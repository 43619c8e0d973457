"""A page, as a browser or a parser reads it."""
