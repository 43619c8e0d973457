"""The trainer that runs in worker pods."""
