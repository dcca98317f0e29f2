"""RUN/plan.json: which engine, which sizes, what the plan said about memory, and what was then measured.

{"engine": "vllm", "sizes": {...}, "parts_gib": {"always: base, packed (nvfp4)": 16.3, ...},
 "predicted_peak_gib": 61.2, "probe_peak_gib": 57.9, "measured_peak_gib": 59.8, "measured_over_predicted": 0.977,
 "parity": {...}}
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qerl.engine.choice import EngineChoice
from qerl.planning.memory_plan import MemoryPlan
from qerl.planning.sizes import GIB

FILE = "plan.json"


class PlanRecord:
    """The file of one run. State: its content."""

    def __init__(self, run_dir: Path, engine: EngineChoice, plan: MemoryPlan):
        """Write what is known before the run."""
        self.path = run_dir / FILE
        self.predicted_gib = plan.peak_bytes / GIB
        self.content: dict[str, Any] = {
            "engine": engine.name,
            "engine_reason": engine.reason,
            "budget_gib": plan.budget.gib,
            "budget_reason": plan.budget.reason,
            "sizes": asdict(plan.sizes),
            "longest_prompt": plan.place.longest_prompt,
            "longest_context": plan.longest_context,
            "parts_gib": {f"{p.phase}: {p.name}": p.num_bytes / GIB for p in plan.parts},
            "predicted_peak_gib": self.predicted_gib,
        }
        self.add({})

    def add(self, values: dict[str, Any]) -> None:
        """Write more; the file is whole at every moment."""
        self.content |= values
        aside = self.path.with_name(f".tmp-{FILE}")
        aside.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(aside, self.path)

    def measured(self, peak_gib: float) -> dict[str, float]:
        """Note the peak so far. Returns metrics: the plan's peak, and the measured one as a multiple of it."""
        ratio = peak_gib / self.predicted_gib
        self.add({"measured_peak_gib": peak_gib, "measured_over_predicted": ratio})
        return {"memory/plan_gib": self.predicted_gib, "memory/peak_over_plan": ratio}
