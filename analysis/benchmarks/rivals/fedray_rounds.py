"""fedray's rounds, for ``compare.py``."""

import json
import os
import tempfile
from typing import Any

from gate import Gate, arguments, workload
from overhead import config

from fedray import simulate
from fedray.config import EngineConfig


def asked_of_engine() -> dict[str, Any]:
    """The keys of section engine that are asked for. A version of fedray without ``compile`` never compiles."""
    asked: dict[str, Any] = json.loads(os.environ.get("ENGINE", "{}"))
    if "compile" not in EngineConfig.model_fields and asked.get("compile") is False:
        del asked["compile"]
    return asked


def main() -> None:
    args = arguments()
    gate = Gate(args.address)
    with tempfile.TemporaryDirectory() as output:
        settings = config(workload(args.workload, args.clients), output)
        settings["engine"] |= asked_of_engine()
        result = simulate(settings, callbacks=[lambda report: gate()])
        gate.leave(int(result.clients["steps"].sum()), "torch", "ray")


if __name__ == "__main__":
    main()
