"""The library's errors; each message names the file, tensor or field, what was found, and what was expected."""


class JaxmethError(ValueError):
    """Base of the library's errors."""


class ConfigError(JaxmethError):
    """A configuration field or an argument has a value that cannot be used."""


class WeightsError(JaxmethError):
    """A weight file is malformed, incomplete, untrusted, or does not fit its configuration."""


class CheckpointError(JaxmethError):
    """A training checkpoint is damaged or belongs to another configuration."""
