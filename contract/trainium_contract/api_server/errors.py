"""Errors between a user and a cluster; the message of each is one sentence with the remedy."""

from __future__ import annotations


class ClientError(Exception):
    """The command cannot be carried out; `str()` is the sentence."""


class NoClusterError(ClientError):
    """No kubeconfig that can be used, or nobody answers at its address."""


class ForbiddenError(ClientError):
    """The API server knows us and refuses; the sentence names the verb and the resource."""


class NotFoundError(ClientError):
    """The object does not exist."""


class ConflictError(ClientError):
    """Somebody else changed it first, or it is there already."""
