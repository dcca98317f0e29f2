"""Values and failures of one `RewardPool.score`, filled in whatever order the workers answer."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.tasks.calls import FailureKind, RewardCall, RewardFailure, RewardResult, RewardSpec


@dataclass(frozen=True)
class Job:
    """Function number `function` on these samples of call number `call`."""

    call: int
    function: int
    samples: range


class Board:
    """State: what is known of every sample so far."""

    def __init__(self, calls: Sequence[RewardCall], specs: Sequence[RewardSpec]):
        self._calls = calls
        self._specs = specs
        self._values: list[list[list[float | None]]] = [
            [[None] * len(call.completions) for _ in specs] for call in calls
        ]
        self._failures: list[dict[tuple[int, int], RewardFailure]] = [{} for _ in calls]
        self._extra: list[dict[str, list[str | None]]] = [{} for _ in calls]
        self._metrics: list[dict[str, list[float]]] = [{} for _ in calls]

    def jobs(self) -> Iterable[Job]:
        for index, call in enumerate(self._calls):
            for function in range(len(self._specs)):
                yield Job(index, function, range(len(call.completions)))

    def call_of(self, job: Job) -> RewardCall:
        call = self._calls[job.call]
        whole = len(job.samples) == len(call.completions)
        return call if whole else call.sample(job.samples[0])

    def fits(self, job: Job, reply: dict[str, Any]) -> bool:
        """True if a reply has one entry a sample."""
        lists = (reply["values"], *reply["extra"].values())
        return all(len(entries) == len(job.samples) for entries in lists)

    def enter(self, job: Job, reply: dict[str, Any]) -> None:
        """A worker's `Outcome` of a job."""
        for sample, value in zip(job.samples, reply["values"], strict=True):
            self._values[job.call][job.function][sample] = value
        num_samples = len(self._calls[job.call].completions)
        for column, texts in reply["extra"].items():
            whole = self._extra[job.call].setdefault(column, [None] * num_samples)
            for sample, text in zip(job.samples, texts, strict=True):
                whole[sample] = text
        for name, numbers in reply["metrics"].items():
            self._metrics[job.call].setdefault(name, []).extend(numbers)

    def fail(self, job: Job, kind: FailureKind, message: str) -> list[Job]:
        """The jobs that retry a group one by one; none for a single sample, whose failure is noted."""
        if len(job.samples) > 1:
            return [Job(job.call, job.function, range(i, i + 1)) for i in job.samples]
        for sample in job.samples:
            name = self._specs[job.function].name
            problem_id = self._calls[job.call].problem_id
            failure = RewardFailure(name, problem_id, sample, kind, message)
            self._failures[job.call][job.function, sample] = failure
        return []

    def describe(self, job: Job) -> str:
        """The failure of a single sample's job, in one line."""
        return describe_failure(self._failures[job.call][job.function, job.samples[0]])

    def share_failed(self) -> float:
        """Share of all samples for which a function has failed so far."""
        failed = sum(len({sample for _, sample in failures}) for failures in self._failures)
        return failed / max(1, sum(len(call.completions) for call in self._calls))

    def commonest_failure(self) -> str:
        """The kind of failure that is most frequent, with its function and one message."""
        failures = [failure for one in self._failures for failure in one.values()]
        (name, kind), count = Counter((f.function, f.kind) for f in failures).most_common(1)[0]
        example = next(f for f in failures if (f.function, f.kind) == (name, kind))
        return f"{count} times {describe_failure(example)}"

    def results(self) -> list[RewardResult]:
        return [
            RewardResult(
                {spec.name: values[index] for index, spec in enumerate(self._specs)},
                tuple(failures[key] for key in sorted(failures)),
                extra,
                metrics,
            )
            for values, failures, extra, metrics in zip(
                self._values, self._failures, self._extra, self._metrics, strict=True
            )
        ]


def describe_failure(failure: RewardFailure) -> str:
    """One line that names function, problem, sample and kind."""
    return (
        f"reward {failure.function}, problem {failure.problem_id}, sample {failure.sample_index}, "
        f"{failure.kind}: {failure.message}"
    )
