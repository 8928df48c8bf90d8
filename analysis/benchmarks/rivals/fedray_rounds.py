"""fedray's rounds, for ``compare.py``."""

import json
import os
import tempfile

from gate import Gate, arguments, workload
from overhead import config

from fedray import simulate


def main() -> None:
    args = arguments()
    gate = Gate(args.address)
    with tempfile.TemporaryDirectory() as output:
        settings = config(workload(args.workload, args.clients), output)
        settings["engine"] |= json.loads(os.environ.get("ENGINE", "{}"))
        result = simulate(settings, callbacks=[lambda report: gate()])
        gate.leave(int(result.clients["steps"].sum()), "torch", "ray")


if __name__ == "__main__":
    main()
