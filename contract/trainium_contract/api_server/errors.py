"""Errors between a user and a cluster; the message of each is one sentence with the remedy."""

from __future__ import annotations


class ClientError(Exception):
    """The command cannot be carried out; `str()` is the sentence."""


class NoClusterError(ClientError):
    """No usable kubeconfig, or no response from its address."""


class ForbiddenError(ClientError):
    """The API server refuses an authenticated request; the sentence names the verb and the resource."""


class NotFoundError(ClientError):
    """The object does not exist."""


class ConflictError(ClientError):
    """Another client changed the object first, or it exists already."""
