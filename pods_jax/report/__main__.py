"""Entry: ``python -m pods_jax.report RUN_FOLDER`` writes the page of a run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pods_jax.report.page import write_report


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m pods_jax.report RUN_FOLDER [--out FILE]``."""
    parser = argparse.ArgumentParser(prog="python -m pods_jax.report", description="Write one HTML page about a run.")
    parser.add_argument("run_folder", type=Path, help="folder of the run, for example runs/default")
    parser.add_argument("--out", type=Path, help="where the page goes; <run_folder>/report.html by default")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run_folder, options.out))
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
