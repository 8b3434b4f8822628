"""Every error a user can cause, as one tree. This file knows no torch and no printing.

MedusaError            message + hint, exit code 1
├── RecipeError        a setting, a recipe file or an override is wrong
├── TargetError        the model can't be found, loaded or verified by a tree
├── HeadsMismatch      the heads were trained for another model, or ask for what it lacks
├── FormatError        a file of ours is missing, corrupt, truncated or of an unknown version
├── MissingExtra       an optional package is not installed
├── PartError          what another package brings can't be used
├── TreeError          a tree specification is not a tree, or is deeper than the heads
├── DataError          prompts or conversations can't be read, or hold nothing usable
├── TrainingError      training can't start or had to stop (not finite, wrong run folder, disk full)
└── ExactnessError     a watch that was asked for found what must not be
"""


class MedusaError(Exception):
    """A mistake a user can fix.

    `message` is one line saying what is wrong and where; `hint` is one line saying what to do about it.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RecipeError(MedusaError):
    """A setting, a recipe file or an override is wrong."""


class TargetError(MedusaError):
    """The model can't be found, loaded, or verified by a tree."""


class HeadsMismatch(MedusaError):
    """The heads were trained for another model, or ask for what this one lacks."""


class FormatError(MedusaError):
    """A file of ours is missing, corrupt, truncated or of an unknown version."""


class MissingExtra(MedusaError):
    """An optional package is not installed."""


class PartError(MedusaError):
    """What another package brings can't be imported, lacks what its protocol wants, or guesses what is no token."""


class TreeError(MedusaError):
    """A tree specification is not a tree, or is deeper than the heads."""


class DataError(MedusaError):
    """Prompts or conversations can't be read, or hold nothing usable."""


class TrainingError(MedusaError):
    """Training can't start, or had to stop before it spoilt something good."""


class ExactnessError(MedusaError):
    """A watch that was asked for found a cache or a text that is not as it must be."""


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust broke down: a panic is no Exception, so that nobody takes it for one."""
    return type(error).__module__ == "pyo3_runtime"
