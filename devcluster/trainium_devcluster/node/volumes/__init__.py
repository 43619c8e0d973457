"""Create, update and remove the volumes of pods."""
