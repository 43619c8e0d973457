"""Typed values as text: for people (rich) and for programs (JSON). Pure: width, colour and time are given."""
