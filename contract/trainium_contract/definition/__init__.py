"""The CustomResourceDefinition, generated from the models, and its CEL rules."""
