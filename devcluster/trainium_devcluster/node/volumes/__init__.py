"""The volumes of pods: made, kept up to date, removed."""
