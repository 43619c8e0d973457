"""From a record to the text of an example, by format."""
