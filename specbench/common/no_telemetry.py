"""OpenVINO without its telemetry, which else sends a message over the network at every import. To be imported before it."""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # as if it were not installed
