"""Start-up profile: CPU seconds of this process by what they went into, from its first moment on. Knows no torch."""

import time


class Phases:
    """Told what begins now; all since the process began, or since then, belonged to what was told before."""

    def __init__(self, first: str) -> None:
        self._seconds: dict[str, float] = {}
        self._name, self._begun = first, 0.0

    def __call__(self, name: str) -> None:
        """The phase of this name begins."""
        now = time.process_time()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._begun
        self._name, self._begun = name, now

    def seconds(self) -> dict[str, float]:
        """By phase, the one that runs included."""
        self(self._name)
        return dict(self._seconds)
