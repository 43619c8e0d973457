"""The CustomResourceDefinition, generated from the models, and the rules that the API server checks."""
