"""Errors meant for people: what is wrong and what to do, in one line; in a notebook too, without a traceback."""


class _OneLine(Exception):
    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"qerl: error: {' '.join(str(self).split())}"]


class UserError(_OneLine, ValueError):
    """Bad input. Entry points print the message as one line and exit with code 2."""


class RunError(_OneLine, RuntimeError):
    """A failure inside a run. `phase` is one of setup, sync, rollout, reward, update, eval, checkpoint, report."""

    def __init__(self, phase: str, message: str):
        super().__init__(f"{phase}: {message}")
        self.phase = phase
        self.message = message
