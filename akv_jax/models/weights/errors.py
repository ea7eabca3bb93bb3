"""The one error of this folder: what a person who points the server at a model must read."""


class ModelError(Exception):
    """A model that cannot be found, read or understood. The message names the file or field, and what was expected."""
