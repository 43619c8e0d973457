"""`spec.trainer`: what is trained on which data and how, one section a file."""
