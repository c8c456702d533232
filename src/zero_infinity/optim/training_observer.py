"""Records unit reads for the step history and trace, and copies user edits into master weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zero_infinity._torch import current_graph_task_id
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.optimizer_state_io import OptimizerStateIO
from zero_infinity.optim.scaled_backward import BackwardScaling
from zero_infinity.optim.state_records import StateRecord
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.run_trace import BACKWARD, RunTrace


class TrainingObserver:
    """Called when a unit is read and when the user changes a parameter."""

    def __init__(
        self,
        gradients: GradientFlow,
        state_io: OptimizerStateIO,
        records: Mapping[Unit, StateRecord],
        run_trace: RunTrace | None,
        scaling: BackwardScaling | None,
    ) -> None:
        self._gradients = gradients
        self._state_io = state_io
        self._records = records
        self._run_trace = run_trace
        self._scaling = scaling

    def before_reads(self, unit: Unit) -> None:
        self._gradients.lagging.before_use(unit)

    def on_read(self, unit: Unit) -> None:
        self._gradients.on_read(unit)
        if self._scaling is not None:
            self._scaling.expect_backward()
        if self._run_trace is not None:
            if current_graph_task_id() >= 0:
                self._run_trace.begin(BACKWARD)
            self._run_trace.computing(unit.name)

    def on_edit(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        value = parameter.of(flat)
        for part in parameter.parts:
            if part.unit in self._records and part.group is not None:
                self._state_io.write_master(part, value if part is parameter else part.rows_of(value))
