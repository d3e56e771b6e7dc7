"""What generation cannot do."""

from ..interop.errors import ErrorAboutFiles


class GenerateError(ErrorAboutFiles):
    """Texts cannot be generated, for the reason in the message."""
