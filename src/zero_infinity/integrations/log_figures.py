"""What a training tool logs beside the loss: bytes moved and seconds waited since it logged last, and the budget."""

from __future__ import annotations

from torch import nn

from zero_infinity import api


class LogFigures:
    """Figures of one prepared model, for loggers of key and value."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last = api.stats(model)

    def since_last(self) -> dict[str, float]:
        """Return the figures since this was called last."""
        last, self._last = self._last, api.stats(self._model)
        now = self._last
        return {
            "zi_read_bytes": float(now.bytes_read - last.bytes_read),
            "zi_written_bytes": float(now.bytes_written - last.bytes_written),
            "zi_sent_bytes": float(sum(now.sent_bytes.values()) - sum(last.sent_bytes.values())),
            "zi_waited_seconds": round(now.waited_seconds - last.waited_seconds, 6),
            "zi_memory_bytes": float(now.memory_held),
            "zi_memory_budget_bytes": float(now.memory_budget),
        }
