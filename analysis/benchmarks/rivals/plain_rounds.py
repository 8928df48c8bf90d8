"""The plain loop's rounds, for ``compare.py``."""

import os

from gate import Gate, arguments, workload
from plain_loop import PlainLoop


def main() -> None:
    args = arguments()
    gate = Gate(args.address)
    layout, compiled = os.environ.get("LAYOUT", "usual"), "COMPILE" in os.environ
    loop = PlainLoop(workload(args.workload, args.clients), layout=layout, compiled=compiled)
    loop.start()
    loop.round()
    while not gate():
        loop.round()
    gate.leave(loop.steps, "torch")
    loop.close()


if __name__ == "__main__":
    main()
