"""From what a person wrote to a checked configuration, or to one sentence that says what is wrong."""
