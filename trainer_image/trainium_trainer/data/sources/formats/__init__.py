"""File formats: how a file is divided into blocks, and the documents or records of a block."""
