"""Checks bills of materials by the schema of their format. `bills.py FOLDER`; prints lines as check.sh does."""

import json
import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

# What both contain, so that an empty list is not taken for a good one.
KNOWN = {"roce", "roce-qp", "libc"}

for path in sorted(Path(sys.argv[1]).glob("*.cdx.json")):
    text = path.read_text()
    bill = json.loads(text)
    error = JsonStrictValidator(SchemaVersion.from_version(bill["specVersion"])).validate_str(text)
    missing = KNOWN - {component["name"] for component in bill["components"]}
    if error:
        print(f"FAILED {path.name}: CycloneDX {bill['specVersion']}: {error.data.message}")
    elif missing:
        print(f"FAILED {path.name}: without {', '.join(sorted(missing))}")
    else:
        print(f"ok {path.name}: CycloneDX {bill['specVersion']}, {len(bill['components'])} crates")
