"""The errors whose text is written for the user and printed without a traceback."""


class UsageError(ValueError):
    """Wrong input: names the field, the value and the remedy. Commands exit with status 2."""


class RunError(RuntimeError):
    """A run that cannot go on for a reason outside the program (no disk space, ...). Commands exit with status 1."""


class Stopped(RunError):
    """A run that ended early because it was asked to; what it had done is in a checkpoint."""
