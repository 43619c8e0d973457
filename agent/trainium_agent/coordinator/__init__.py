"""Report to the operator's coordinator and receive memberships from it."""
