"""Llama: shapes, the model, how it is divided over ranks, and names in and out."""
